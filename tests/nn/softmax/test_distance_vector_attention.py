"""Scores with a vector for every distance: shifts are views, and blocks are the definition, gradients too."""

import pytest
import torch
from torch import Tensor

from manyformer.models.embedding import positions_of
from manyformer.nn import KernelCall, SoftmaxKernel
from manyformer.nn.core import PADDING_SEGMENT, AlignedLayout
from manyformer.nn.masks import AllKeys, Causal, Mask
from manyformer.nn.positions import DistanceAwarePosition, TransformerXLPosition
from manyformer.nn.positions.position import broadcast_pairs, toeplitz_view
from manyformer.nn.softmax import distance_vector_attention
from manyformer.nn.softmax.toeplitz_attention import QueryOffset
from token_rows import range_positions

HEADS, WIDTH, DIM = 2, 4, 8


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 5), (4, 1), (3, 7), (6, 6)])
def test_a_shift_is_a_look_up_by_distance(queries: int, keys: int) -> None:
    each = torch.randn(2, 3, queries, queries + keys - 1, requires_grad=True)
    columns = torch.arange(keys)[None, :] - torch.arange(queries)[:, None] + queries - 1
    expected = each.gather(-1, columns.expand(2, 3, -1, -1))
    actual = toeplitz_view(each, keys)
    assert torch.equal(actual, expected)
    assert actual.data_ptr() == each.data_ptr() + (queries - 1) * each.element_size()
    grad_output = torch.randn_like(expected)
    assert torch.equal(*(torch.autograd.grad(y, each, grad_output)[0] for y in (actual, expected)))
    alike = broadcast_pairs(each[0, 0, :1].expand(queries, -1)[0], queries)
    assert torch.equal(alike, each[0, 0, 0][columns])


def made() -> TransformerXLPosition:
    xl = TransformerXLPosition(DIM, HEADS).double()
    with torch.no_grad():
        for value in xl.parameters():
            value.normal_(std=0.5)
    return xl


def blocks(xl: TransformerXLPosition, q: Tensor, k: Tensor, v: Tensor, offset: int, mask: Mask) -> Tensor:
    causal = mask == Causal()
    actual = xl.distance_terms(
        offset + q.shape[2] - 1, distance_vector_attention.BLOCK if causal else k.shape[2] - 1 - offset
    )
    assert actual.keys is not None
    q = xl.query(q, range_positions(q.shape[2], offset))
    span = QueryOffset(offset, causal)
    return distance_vector_attention.distance_vector_attention(
        q, k, v, actual.keys, actual.query_bias, actual.lookback, span, scale=WIDTH**-0.5
    )


@pytest.mark.parametrize("mask", [Causal(), AllKeys()], ids=repr)
@pytest.mark.parametrize(("kept", "cached"), [(0, 1), (1 << 20, 2), (1 << 20, 4)])
@pytest.mark.parametrize(("queries", "offset", "later"), [(1, 0, 0), (5, 3, 0), (40, 0, 0), (23, 30, 2), (16, 16, 0)])
def test_blocks_are_the_definition(
    mask: Mask, queries: int, offset: int, later: int, kept: int, cached: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With blocks of 16, whole ones and rests; a row, a head or both heads at a time; with gradients of everything."""
    monkeypatch.setattr(distance_vector_attention, "MAX_BLOCK_QUERIES", 16)
    monkeypatch.setattr(distance_vector_attention, "SCORES_PER_THREAD", cached * 16 * (offset + queries + later))
    monkeypatch.setattr(distance_vector_attention, "MAX_SAVED_WEIGHTS", kept)
    xl, keys = made(), offset + queries + later
    sizes = (queries, keys, keys)
    q, k, v = (torch.randn(2, HEADS, n, WIDTH, dtype=torch.float64, requires_grad=True) for n in sizes)
    at, of = range_positions(queries, offset), range_positions(keys, 0)
    expected = SoftmaxKernel(mask, path="naive")(KernelCall(xl.query(q, at), k, v, at, of, xl)).y
    actual = blocks(xl, q, k, v, offset, mask)
    torch.testing.assert_close(actual, expected, atol=1e-10, rtol=0)
    grad_output, leaves = torch.randn_like(expected), [q, k, v, *xl.parameters()]
    pairs = zip(
        torch.autograd.grad(actual, leaves, grad_output),
        torch.autograd.grad(expected, leaves, grad_output),
        strict=True,
    )
    for ours, reference in pairs:
        torch.testing.assert_close(ours, reference, atol=1e-10, rtol=0)
    with torch.no_grad():
        torch.testing.assert_close(blocks(xl, q, k, v, offset, mask), expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize("dropout", [0.0, 1e-9])
@pytest.mark.parametrize(("kind", "apart"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_rows_of_several_documents_that_stand_side_by_side(kind: torch.dtype, apart: float, dropout: float) -> None:
    """After a memory, in rows that are at different positions; both forms, with gradients."""
    segments = torch.tensor([[0] * 30 + [1] * 70, [2] * 100, [PADDING_SEGMENT] * 10 + [3] * 45 + [4] * 45])
    place, _ = positions_of(segments, segments, None)
    of, at = place._replace(layout=AlignedLayout(7)), place.columns(60, 100)._replace(layout=AlignedLayout(67))
    q, k, v = (torch.randn(3, HEADS, n, WIDTH, dtype=kind, requires_grad=True) for n in (40, 100, 100))
    xl, actual = made().to(kind), []
    leaves = [q, k, v, *xl.parameters()]
    grad_output = torch.randn_like(q)
    for path in ("naive", "auto"):
        kernel = SoftmaxKernel(Causal(), path=path, dropout=dropout)  # type: ignore[arg-type]
        y = kernel(KernelCall(xl.query(q, at), k, v, at, of, xl)).y
        actual.append([y, *torch.autograd.grad(y, leaves, grad_output)])
    assert "rows of contiguous tokens" in kernel.explain(KernelCall(q, k, v, at, of, xl))
    for ours, reference in zip(*actual, strict=True):
        torch.testing.assert_close(ours, reference, atol=apart, rtol=apart)


def test_dropout_draws_the_same_weights_for_the_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs are linear in the values: their sum is the gradient times the values, if both drop the same weights."""
    monkeypatch.setattr(distance_vector_attention, "BLOCK", 4)
    vectors, v = torch.zeros(1, 23, WIDTH), torch.randn(1, 1, 12, WIDTH, requires_grad=True)
    still = torch.zeros(1, 1, 12, WIDTH)
    y = distance_vector_attention.distance_vector_attention(
        still, still, v, vectors, None, 11, QueryOffset(0, causal=False), scale=1.0, dropout=0.5
    )
    torch.testing.assert_close(y.sum(), (torch.autograd.grad(y.sum(), v)[0] * v).sum())


def test_the_kernel_takes_it_for_positions_with_a_vector_for_each_distance() -> None:
    xl, place = made(), range_positions(150, 0)
    q, k, v = (torch.randn(1, HEADS, 150, WIDTH, dtype=torch.float64) for _ in range(3))
    kernel = SoftmaxKernel(Causal())
    assert kernel.explain(KernelCall(q, k, v, place, place, xl)).startswith(
        "blocked: TransformerXLPosition has a vector for each distance"
    )
    expected = SoftmaxKernel(Causal(), path="naive")(KernelCall(q, k, v, place, place, xl)).y
    torch.testing.assert_close(kernel(KernelCall(q, k, v, place, place, xl)).y, expected, atol=1e-10, rtol=0)
    late, seen = range_positions(3, 147), q[:, :, 147:]
    assert kernel.explain(KernelCall(seen, k, v, late, place, xl)).startswith("naive")
    torch.testing.assert_close(
        kernel(KernelCall(seen, k, v, late, place, xl)).y, expected[:, :, 147:], atol=1e-10, rtol=0
    )


@pytest.mark.parametrize("mask", [Causal(), AllKeys()], ids=repr)
def test_packed_documents_each_by_itself(mask: Mask) -> None:
    segments = torch.tensor([[0] * 80 + [1] * 100, [PADDING_SEGMENT] * 30 + [0] * 150])
    place, _ = positions_of(segments.clamp(min=0), segments, None)
    xl, real = made(), (segments != PADDING_SEGMENT)[:, None, :, None]
    q, k, v = (torch.randn(2, HEADS, 180, WIDTH, dtype=torch.float64) for _ in range(3))
    kernel = SoftmaxKernel(mask)
    assert "one call for each of 3 documents" in kernel.explain(KernelCall(q, k, v, place, place, xl))
    expected = SoftmaxKernel(mask, path="naive")(KernelCall(q, k, v, place, place, xl)).y
    torch.testing.assert_close(
        kernel(KernelCall(q, k, v, place, place, xl)).y * real, expected * real, atol=1e-10, rtol=0
    )


@pytest.mark.parametrize("plain", [True, False])
def test_distance_aware_blocks_are_the_definition(plain: bool) -> None:
    part, place = DistanceAwarePosition(HEADS).double(), range_positions(300, 0)
    place = place if plain else place._replace(layout=None)
    q, k, v = (torch.randn(1, HEADS, 300, WIDTH, dtype=torch.float64, requires_grad=True) for _ in range(3))
    leaves = [q, k, v, part.w, part.v]
    grad_output, actual = torch.randn(1, HEADS, 300, WIDTH, dtype=torch.float64), []
    for path in ("naive", "blocked"):
        y = SoftmaxKernel(Causal(), path=path)(KernelCall(q, k, v, place, place, part)).y  # type: ignore[arg-type]
        actual.append([y, *torch.autograd.grad(y, leaves, grad_output)])
    for ours, reference in zip(*actual, strict=True):
        torch.testing.assert_close(ours, reference, atol=1e-10, rtol=0)
