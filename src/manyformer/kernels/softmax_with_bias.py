"""Softmax attention with a position that acts on scores or values, by the selected algorithm."""

import torch
from torch import Tensor

from manyformer.core import ContiguousLayout
from manyformer.kernels.biased_softmax_plan import BLOCK, BiasedSoftmaxPlan, SoftmaxCall, is_plain_bias
from manyformer.ops import (
    clipped_distance_attention,
    distance_vector_attention,
    flex_bias_attention,
    tiled_attention,
    toeplitz_attention,
)
from manyformer.ops.distance_vector_blocks import SegmentPair
from manyformer.ops.softmax_attention import map_documents
from manyformer.ops.toeplitz_attention import QueryOffset
from manyformer.position import Position
from manyformer.position.distance_terms import DistanceTerms
from manyformer.recompute import recompute_for_gradient


def run_plan(plan: BiasedSoftmaxPlan, softmax: SoftmaxCall) -> Tensor:
    """Compute the outputs (b, h, l, f) of a plan."""
    query_offset, (q, k, v, query_positions, key_positions, position, *_) = plan.query_offset, softmax.call
    if plan.sparse_plan is not None:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        mask = softmax.mask if softmax.mask.per_head else None
        options = mask, softmax.scale, softmax.dropout
        seams = tiled_attention.PositionSeams(position, query_positions, key_positions, *options)
        return tiled_attention.tiled_attention(q, k, v, plan.sparse_plan, seams)
    if query_offset is None:
        return _run_blocked(softmax)
    if plan.path == "flex":
        terms = _query_terms(position, query_offset, q.shape[2], k.shape[2])
        return flex_bias_attention.flex_bias_attention(
            q, k, v, _score_terms(terms, q), terms.lookback, terms.lookahead, query_offset, scale=softmax.scale
        )

    def compute(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if plan.form == "shifted":
            return _run_shifted(softmax, query_offset, plan.segments, q, k, v)
        return _run_clipped_or_bias(softmax, query_offset, q, k, v)

    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    return compute(q, k, v) if plan.packed_layout is None else map_documents(q, k, v, plan.packed_layout, compute)


def _run_blocked(softmax: SoftmaxCall) -> Tensor:
    """The definition, one block of queries at a time: any mask and position, memory linear in length.

    Scores and weights are computed again for the gradient, block by block.
    """
    call, mask, scale, dropout = softmax
    query_positions, key_positions, num_keys = call.query_positions, call.key_positions, call.k.shape[2]
    is_contiguous = all(isinstance(x.layout, ContiguousLayout) for x in (query_positions, key_positions))
    offset = query_positions.layout.start - key_positions.layout.start if is_contiguous else 0  # type: ignore[union-attr]

    def block(q: Tensor, k: Tensor, v: Tensor, begin: int) -> Tensor:
        queries, keys = query_positions.columns(begin, begin + q.shape[2]), key_positions.columns(0, k.shape[2])
        block_call = call._replace(q=q, k=k, v=v, query_positions=queries, key_positions=keys)
        return block_call.softmax_reference(mask.dense(queries, keys, q.shape[1]), scale=scale, dropout=dropout)[0]

    parts = []
    for begin in range(0, call.q.shape[2], BLOCK):
        q = call.q[:, :, begin : begin + BLOCK]
        # no query of the block attends to later keys
        stop = min(max(begin + q.shape[2] + offset, 1), num_keys) if is_contiguous and mask.causal else num_keys
        k, v = call.k[:, :, :stop], call.v[:, :, :stop]
        parts.append(recompute_for_gradient(block, q, k, v, begin, dropout=dropout))
    return torch.cat(parts, dim=2)


def _run_clipped_or_bias(softmax: SoftmaxCall, query_offset: QueryOffset, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    terms = _query_terms(softmax.call.position, query_offset, q.shape[2], k.shape[2])
    if is_plain_bias(terms):
        assert terms.bias is not None
        return toeplitz_attention.toeplitz_attention(
            q, k, v, terms.bias, terms.lookback, query_offset, scale=softmax.scale
        )
    reach = clipped_distance_attention.ClippedDistances(terms.lookback, terms.lookahead, *query_offset)
    return clipped_distance_attention.clipped_distance_attention(
        q, k, v, _score_terms(terms, q), terms.values, reach, scale=softmax.scale
    )


def _run_shifted(
    softmax: SoftmaxCall, query_offset: QueryOffset, segments: SegmentPair | None, q: Tensor, k: Tensor, v: Tensor
) -> Tensor:
    queries, keys = q.shape[2], k.shape[2]
    # a causal call masks keys ahead, but within a block their scores are computed
    max_ahead = distance_vector_attention.BLOCK if query_offset.causal else keys - 1 - query_offset.offset
    terms = softmax.call.position.distance_terms(query_offset.offset + queries - 1, max_ahead)
    assert terms is not None
    assert terms.keys is not None
    vectors = terms.keys.expand(q.shape[1], -1, -1)
    return distance_vector_attention.distance_vector_attention(
        q,
        k,
        v,
        vectors,
        terms.query_bias,
        terms.lookback,
        query_offset,
        segments=segments,
        scale=softmax.scale,
        dropout=softmax.dropout,
    )


def _query_terms(position: Position, query_offset: QueryOffset, queries: int, keys: int) -> DistanceTerms:
    """The distance terms of all distances in this call, with at least one on either side."""
    lookahead = 0 if query_offset.causal else max(1, keys - 1 - query_offset.offset)
    terms = position.distance_terms(max(1, query_offset.offset + queries - 1), lookahead)
    assert terms is not None
    return terms


def _score_terms(distance_terms: DistanceTerms, q: Tensor) -> Tensor:
    """The terms added to scores, (b, h, l, r), with axes of size 1 where they do not depend on b, h or l."""
    terms = q.new_zeros(1, 1, 1, distance_terms.lookback + distance_terms.lookahead + 1)
    if distance_terms.bias is not None:
        terms = terms + distance_terms.bias[None, :, None]
    if distance_terms.keys is not None:
        terms = terms + q @ distance_terms.keys.mT
    return terms
