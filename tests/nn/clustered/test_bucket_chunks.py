"""Attention within groups: fast forms against the definition, gradients too, and who sees whom."""

import pytest
import torch
from torch import Tensor

from manyformer.nn.clustered import bucket_chunks

TYPES = pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)], ids=["32", "64"]
)


def drawn(dtype: torch.dtype, length: int = 23, clusters: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    k, v = (torch.randn(2, 3, length, 6, dtype=dtype, requires_grad=True) for _ in range(2))
    return k, v, torch.randn(2, 3, length, clusters, dtype=dtype)


@TYPES
@pytest.mark.parametrize("size", [1, 7, 23])
def test_balanced_groups_are_a_mean_of_softmaxes(dtype: torch.dtype, tolerance: float, size: int) -> None:
    k, v, likeness = drawn(dtype)
    members = bucket_chunks.top_members(likeness, size)
    fast, (slow, weights) = (
        form(k, v, members, scale=0.3)
        for form in (bucket_chunks.balanced_attention, bucket_chunks.balanced_attention_reference)
    )
    torch.testing.assert_close(fast, slow, atol=tolerance, rtol=0)
    grad_output = torch.randn_like(fast)
    actual, expected = (
        torch.autograd.grad(y, (k, v), grad_output, allow_unused=True, materialize_grads=True) for y in (fast, slow)
    )
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=0)
    inside = (members[..., None] == torch.arange(23)).any(3).any(2)
    torch.testing.assert_close(weights.sum(-1), inside.to(dtype))


def test_members_are_the_most_alike_in_order() -> None:
    likeness = torch.randn(1, 1, 9, 2).masked_fill(torch.arange(9)[:, None] >= 7, -torch.inf)
    actual = bucket_chunks.top_members(likeness, 4, torch.tensor([3]))
    for group in range(2):
        best = likeness[0, 0, :, group].argsort(descending=True)[:3].sort().values
        assert actual[0, 0, group].tolist() == [*best.tolist(), 9]


def test_absent_tokens_are_in_no_group() -> None:
    likeness = torch.randn(2, 1, 5, 3)
    likeness[0, :, 2:] = -torch.inf
    likeness[1] = -torch.inf
    k, v = torch.randn(2, 1, 5, 4), torch.randn(2, 1, 5, 4)
    members = bucket_chunks.top_members(likeness, 4)
    assert (members[1] == 5).all()
    y = bucket_chunks.balanced_attention(k, v, members, scale=1.0)
    assert not y[0, :, 2:].any()
    assert not y[1].any()
    alone = bucket_chunks.balanced_attention(
        k[:1, :, :2], v[:1, :, :2], bucket_chunks.top_members(likeness[:1, :, :2], 4), scale=1.0
    )
    torch.testing.assert_close(y[:1, :, :2], alone)


def test_who_sees_whom_follows_from_ranks() -> None:
    group, size = torch.randint(3, (2, 2, 19)), 3
    rank = bucket_chunks.ranks(group, 19)
    seen = bucket_chunks.visible_members(group, rank, size, 19)
    for row, head, query in ((0, 0, 18), (1, 1, 11), (0, 1, 0)):
        ours = [j for j in range(query) if group[row, head, j] == group[row, head, query]]
        assert rank[row, head, query] == len(ours)
        begin = max(len(ours) // size - 1, 0) * size
        assert seen[row, head, query].nonzero().flatten().tolist() == (ours[begin:] or [query])
    assert torch.equal(bucket_chunks.visible_members(group, rank, size, 4), seen[:, :, -4:])
    assert torch.equal(bucket_chunks.ranks(group, 4), rank[..., -4:])
