"""Attention with its log-sum-exp: both forms are softmax written out, whole and in parts."""

import pytest
import torch
from torch import Tensor

from manyformer.nn.ops import attention_with_lse


@pytest.fixture(params=["fused", "written out"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "written out":
        monkeypatch.setattr(attention_with_lse, "FUSED", False)
        monkeypatch.setattr(attention_with_lse, "BLOCK", 5)
    elif not attention_with_lse.FUSED:
        pytest.skip("this torch has no private operators")
    return str(request.param)


def draw(queries: int, keys: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return tuple(torch.randn(2, 3, n, 8, dtype=torch.float64) for n in (queries, keys, keys, queries))  # type: ignore[return-value]


@pytest.mark.parametrize("kind", ["plain", "causal", "bias"])
def test_it_is_softmax_with_gradients(form: str, kind: str) -> None:
    rows, keys = (11, 11) if kind == "causal" else (11, 17)
    q, k, v, grad_output = draw(rows, keys)
    bias = torch.randn(3, 28, dtype=torch.float64).as_strided((1, 3, rows, keys), (0, 28, 1, 1))
    bias = bias if kind == "bias" else None
    for x in (q, k, v):
        x.requires_grad_()
    scores = q @ k.mT * 0.3 + (0 if bias is None else bias)
    if kind == "causal":
        scores = scores.masked_fill(torch.ones(rows, keys).triu(1).bool(), -torch.inf)
    expected = scores.softmax(-1) @ v
    gradients = torch.autograd.grad((expected * grad_output).sum(), (q, k, v))
    with torch.no_grad():
        y, lse = attention_with_lse.attention_forward(q, k, v, scale=0.3, bias=bias, causal=kind == "causal")
        actual = attention_with_lse.attention_backward(
            grad_output, q, k, v, y, lse, scale=0.3, bias=bias, causal=kind == "causal"
        )
    torch.testing.assert_close((y, lse), (expected, scores.logsumexp(-1)), atol=1e-12, rtol=0)
    torch.testing.assert_close(actual, gradients, atol=1e-12, rtol=0)


def test_the_gradient_of_a_part_comes_from_the_merged_result(form: str) -> None:
    q, k, v, grad_output = draw(7, 12)
    y, lse = attention_with_lse.attention_forward(q, k, v, scale=0.3)
    full = attention_with_lse.attention_backward(grad_output, q, k, v, y, lse, scale=0.3)
    parts = [
        attention_with_lse.attention_backward(grad_output, q, k[:, :, cut], v[:, :, cut], y, lse, scale=0.3)
        for cut in (slice(5), slice(5, 12))
    ]
    torch.testing.assert_close(parts[0][0] + parts[1][0], full[0], atol=1e-12, rtol=0)
    for index in (1, 2):
        torch.testing.assert_close(torch.cat([part[index] for part in parts], 2), full[index], atol=1e-12, rtol=0)


def test_widths_that_the_kernel_does_not_take_are_written_out() -> None:
    q, k, v, _ = draw(4, 6)
    y, lse = attention_with_lse.attention_forward(q, k, v[..., :5], scale=0.3)
    assert not attention_with_lse.flash_applies(q, v[..., :5])
    torch.testing.assert_close(y, attention_with_lse.attention_forward(q, k, v, scale=0.3)[0][..., :5])
    assert lse.shape == (2, 3, 4)


def test_narrow_types_keep_a_wide_log_sum_exp(form: str) -> None:
    q, k, v, _ = (x.bfloat16() for x in draw(9, 9))
    y, lse = attention_with_lse.attention_forward(q, k, v, scale=0.3, causal=True)
    assert (y.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
