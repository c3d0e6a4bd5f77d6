"""Balanced matrices, and attention to blocks that they sort: many small rows, some at a time, gradients too."""

from typing import Any

import pytest
import torch
from torch import Tensor

from manyformer.nn.clustered import sinkhorn_attention
from manyformer.nn.ops import softmax_attention as softmax_ops

TYPES = pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)], ids=["32", "64"]
)


@pytest.mark.parametrize(("temperature", "bound"), [(1.0, 5e-3), (0.25, 0.5)])
def test_rows_sum_to_one_and_columns_nearly(temperature: float, bound: float) -> None:
    logits = torch.randn(4, 8, 8, dtype=torch.float64) / temperature
    apart = []
    for steps in (0, 2, 8):
        sort = sinkhorn_attention.balance(logits, steps=steps, causal=False)
        torch.testing.assert_close(sort.sum(-1), torch.ones(4, 8, dtype=torch.float64))
        apart.append(float((sort.sum(-2) - 1).abs().max()))
    assert apart[2] < bound
    assert apart[2] < apart[1] < apart[0]


def test_it_is_the_plain_iteration() -> None:
    logits = torch.randn(5, 5, dtype=torch.float64)
    plain = logits.exp() / logits.exp().sum(-1, keepdim=True)
    for _ in range(3):
        plain = plain / plain.sum(-2, keepdim=True)
        plain = plain / plain.sum(-1, keepdim=True)
    torch.testing.assert_close(sinkhorn_attention.balance(logits, steps=3, causal=False), plain)


def test_cold_scores_give_a_permutation() -> None:
    order = torch.randperm(6)
    logits = torch.zeros(6, 6).scatter_(1, order[:, None], 1.0) / 0.02
    sort = sinkhorn_attention.balance(logits, steps=8, causal=False)
    torch.testing.assert_close(sort, torch.eye(6)[order], atol=1e-6, rtol=0)


@pytest.mark.parametrize("steps", [0, 3])
def test_later_rows_change_no_earlier_one(steps: int) -> None:
    logits = torch.randn(7, 7)
    other = torch.cat([logits[:4], torch.randn(3, 7)])
    one, two = (sinkhorn_attention.balance(x, steps=steps, causal=True) for x in (logits, other))
    assert torch.equal(one[:4], two[:4])
    assert not one.triu().any()
    torch.testing.assert_close(one[1:].sum(-1), torch.ones(6))


def test_balanced_in_full_a_causal_matrix_gives_the_block_before() -> None:
    logits = torch.randn(6, 6, dtype=torch.float64)
    # 1 over what row 2 takes of block 0 grows by 2 with every step
    first, later = (1 / sinkhorn_attention.balance(logits, steps=steps, causal=True)[2, 0] for steps in (0, 5))
    torch.testing.assert_close(later, first + 10)
    much = sinkhorn_attention.balance(logits, steps=3000, causal=True)
    assert (much.diagonal(-1) > 0.9).all()


def test_gradients_are_finite_where_nothing_is_valid() -> None:
    logits = torch.randn(2, 5, 5, requires_grad=True)
    valid = torch.ones(2, 5, 5, dtype=torch.bool)
    valid[0, 3:], valid[0, :, 3:], valid[1] = False, False, False
    for causal in (False, True):
        sort = sinkhorn_attention.balance(logits, steps=3, causal=causal, valid=valid)
        assert (sort[~valid] == 0).all()
        (gradient,) = torch.autograd.grad((sort * torch.randn_like(sort)).sum(), logits)
        assert gradient.isfinite().all()


def drawn(dtype: torch.dtype, blocks: int = 4, size: int = 3, queries: int | None = None) -> list[Tensor]:
    counts = (queries or blocks, blocks, blocks)
    actual = [torch.randn(2, 2, count, size, 5, dtype=dtype, requires_grad=True) for count in counts]
    return [*actual, torch.rand(2, 2, counts[0], blocks, dtype=dtype).softmax(-1).requires_grad_()]


@TYPES
@pytest.mark.parametrize("causal", [False, True], ids=["both sides", "causal"])
@pytest.mark.parametrize("queries", [4, 2])
def test_attention_is_the_definition(dtype: torch.dtype, tolerance: float, causal: bool, queries: int) -> None:
    inputs = drawn(dtype, queries=queries)
    fast, slow = (
        form(*inputs, causal=causal, scale=0.4)
        for form in (sinkhorn_attention.sinkhorn_attention, sinkhorn_attention.sinkhorn_attention_reference)
    )
    torch.testing.assert_close(fast, slow, atol=tolerance, rtol=0)
    grad_output = torch.randn_like(fast)
    actual, expected = (torch.autograd.grad(y, inputs, grad_output) for y in (fast, slow))
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=0)


def test_a_permutation_is_a_mask() -> None:
    """Of 4 blocks, each sees itself and another one: what a dense softmax over the same pairs gives."""
    q, k, v, _ = drawn(torch.float64)
    order = torch.tensor([2, 3, 1, 0])
    sort = torch.eye(4, dtype=torch.float64)[order].expand(2, 2, 4, 4)
    y = sinkhorn_attention.sinkhorn_attention(q, k, v, sort, causal=False, scale=0.4).flatten(2, 3)
    block = torch.arange(12) // 3
    mask = (block[:, None] == block) | (order[block][:, None] == block)
    dense = softmax_ops.fused_attention(
        *(x.flatten(2, 3) for x in (q, k, v)), mask[None, None], causal=False, scale=0.4
    )
    torch.testing.assert_close(y, dense)


def test_the_identity_is_local_attention() -> None:
    q, k, v, _ = drawn(torch.float64)
    sort = torch.eye(4, dtype=torch.float64).expand(2, 2, 4, 4)
    y = sinkhorn_attention.sinkhorn_attention(q, k, v, sort, causal=False, scale=0.4)
    torch.testing.assert_close(y, (q @ k.mT * 0.4).softmax(-1) @ v)


def test_absent_tokens_are_sorted_too() -> None:
    """A permutation that puts a block of 1 token beside others: one key more, not three."""
    q, k, v, _ = drawn(torch.float64)
    present = torch.ones(2, 4, 3, dtype=torch.bool)
    present[:, 3, 1:] = False
    k, v = (x.detach() * present[:, None, ..., None] for x in (k, v))
    order = torch.tensor([3, 2, 1, 0])
    sort = torch.eye(4, dtype=torch.float64)[order].expand(2, 2, 4, 4)
    y = sinkhorn_attention.sinkhorn_attention(q, k, v, sort, causal=False, scale=0.4, present=present).flatten(2, 3)
    block = torch.arange(12) // 3
    mask = ((block[:, None] == block) | (order[block][:, None] == block)) & present[0].flatten()
    dense = softmax_ops.fused_attention(
        *(x.flatten(2, 3) for x in (q, k, v)), mask[None, None], causal=False, scale=0.4
    )
    torch.testing.assert_close(y[:, :, :10], dense[:, :, :10])


@pytest.mark.parametrize("short", [False, True])
def test_a_cut_shows_all_the_same_blocks(short: bool) -> None:
    q, k, v, _ = drawn(torch.float64)
    present = torch.ones(2, 4, 3, dtype=torch.bool)
    present[:, 3, 1:] = not short
    k, v = (x.detach() * present[:, None, ..., None] for x in (k, v))
    sort = torch.eye(4, dtype=torch.float64)[torch.tensor([1, 3])].expand(2, 2, 2, 4)
    y = sinkhorn_attention.sortcut_attention(q, k, v, sort, scale=0.4, present=present if short else None).flatten(2, 3)
    block = torch.arange(12) // 3
    mask = ((block == 1) | (block == 3)) & present[0].flatten()
    dense = softmax_ops.fused_attention(
        *(x.flatten(2, 3) for x in (q, k, v)), mask.expand(1, 1, 12, 12), causal=False, scale=0.4
    )
    torch.testing.assert_close(y, dense)


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
