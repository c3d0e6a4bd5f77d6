"""Several sets of keys in one softmax, a row at a time, against the definition, gradients too."""

import pytest
import torch

from manyformer.ops import merged
from manyformer.ops.merged import Part


@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-5), (torch.float64, 1e-10)], ids=["32", "64"])
@pytest.mark.parametrize(("value", "kept"), [(8, 1 << 24), (5, 0)], ids=["kept", "computed again"])
def test_parts_are_one_softmax(
    dtype: torch.dtype, near: float, value: int, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merged, "PAIRS", 1)
    monkeypatch.setattr(merged, "KEPT", kept)
    q = torch.randn(3, 2, 7, 8, dtype=dtype, requires_grad=True)
    keys = [torch.randn(3, 2, count, 8, dtype=dtype, requires_grad=True) for count in (7, 7, 4)]
    values = [torch.randn(3, 2, count, value, dtype=dtype, requires_grad=True) for count in (7, 7, 4)]
    bias = torch.randn(3, 1, 7, 4, dtype=dtype).masked_fill(torch.rand(3, 1, 7, 4) < 0.5, -torch.inf)
    parts = [
        Part(keys[0], values[0], causal=True),
        Part(keys[1], values[1], blind=torch.tensor([True, False, False])[:, None, None]),
        Part(keys[2], values[2], bias=bias, blind=(bias == -torch.inf).all(-1)),
    ]
    fast, slow = (form(q, parts, scale=0.4) for form in (merged.attend, merged.naive))
    torch.testing.assert_close(fast, slow, atol=near, rtol=0)
    up, wanted = torch.randn_like(fast), (q, *keys, *values)
    got, want = (torch.autograd.grad(y, wanted, up) for y in (fast, slow))
    torch.testing.assert_close(got, want, atol=near, rtol=0)
