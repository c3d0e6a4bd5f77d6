"""Many small rows, some at a time, against the definition, gradients too."""

from typing import Any

import pytest
import torch

from manyformer.ops import sinkhorn_attention


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)], ids=["32", "64"])
@pytest.mark.parametrize(
    ("form", "value", "kept"),
    [
        (sinkhorn_attention.small_batch_attention, 8, 1 << 24),
        (sinkhorn_attention.small_batch_attention, 5, 0),
        (sinkhorn_attention.sdpa_attention, 5, 0),
    ],
    ids=["kept", "computed again", "fused"],
)
@pytest.mark.parametrize("shared", [False, True], ids=["each head's bias", "one bias"])
def test_it_is_the_definition(
    form: Any,
    dtype: torch.dtype,
    tolerance: float,
    value: int,
    kept: int,
    shared: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sinkhorn_attention, "PAIRS_PER_THREAD", 70)
    monkeypatch.setattr(sinkhorn_attention, "MAX_SAVED_WEIGHTS", kept)
    # as projections lay them
    q = torch.randn(5, 7, 2, 8, dtype=dtype).transpose(1, 2).requires_grad_()
    k, v = (torch.randn(5, 2, 11, width, dtype=dtype, requires_grad=True) for width in (8, value))
    mask = torch.rand(7, 11) < 0.5
    mask[:, 0] = True
    bias = torch.randn(5, 1 if shared else 2, 11, dtype=dtype)
    bias[:2], bias[2, :, 1:] = 0.0, -torch.inf
    fast, slow = (
        one(q, k, v, scale=0.4, mask=mask, bias=bias)
        for one in (form, sinkhorn_attention.small_batch_attention_reference)
    )
    torch.testing.assert_close(fast, slow, atol=tolerance, rtol=0)
    grad_output = torch.randn_like(fast)
    actual, expected = (torch.autograd.grad(y, (q, k, v), grad_output) for y in (fast, slow))
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=0)
