"""Softmax attention for calls that need more than torch's kernel: forms by distance and in blocks, and dense masks.

A position that acts on scores or values is computed by distance where it knows distances and the mask makes pairs of
equal distance alike (`find_distance_form`), else in blocks, of the visible pairs or of queries. `dense_mask` keeps the
masks that other calls give to torch's kernel.
"""

from functools import lru_cache, partial
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool
from torch import Tensor

from manyformer.nn.core import (
    AlignedLayout,
    ContiguousLayout,
    PackedLayout,
    PrefixedLayout,
    RingLayout,
    StepLayout,
    TokenPositions,
)
from manyformer.nn.kernels.kernel import KernelCall
from manyformer.nn.masks.eviction import visible_in_ring
from manyformer.nn.masks.local import Causal
from manyformer.nn.masks.mask import AllKeys, Mask
from manyformer.nn.ops import softmax_attention
from manyformer.nn.ops.static_layout import layout_is_complete, materialize
from manyformer.nn.positions.position import DistanceTerms, Position
from manyformer.nn.runtime.device_reads import is_readable
from manyformer.nn.runtime.recompute import recompute_for_gradient
from manyformer.nn.runtime.torch_internals import is_traced
from manyformer.nn.softmax import (
    clipped_distance_attention,
    distance_vector_attention,
    flex_attention,
    tiled_attention,
    toeplitz_attention,
)
from manyformer.nn.softmax.distance_vector_attention import SegmentPair
from manyformer.nn.softmax.sparse_plan import SparsePlan
from manyformer.nn.softmax.toeplitz_attention import QueryOffset

MAX_BAND_DISTANCE = 1024
"""A position with at least this many distances is computed in blocks: the band would be too wide."""

MIN_DOCUMENT_LENGTH = 64
"""Packed documents of fewer tokens on average are cheaper in one masked call than in one call each."""

BLOCK = 128
"""Queries per block where a position acts on each pair."""

MAX_CACHED_MASK_PAIRS = 1 << 17
"""Dense masks of layouts with at most so many pairs are kept for the next calls."""


class DistanceForm(NamedTuple):
    """What is known where a position depends on distances alone, and the mask makes pairs of equal distance alike.

    `kind` is what the position adds: a "vector" for each distance, a "bias" without a gradient, or "clipped" terms, the
    same for all far keys; None where it knows no distances, or none of these computes the call. `offset` is that of the
    queries, of the call or of each document; None where pairs of equal distance may differ. `packed_layout` are the
    documents that are computed one by one, `segments` those of documents that share rows."""

    kind: Literal["vector", "bias", "clipped"] | None
    terms: DistanceTerms | None
    offset: QueryOffset | None
    packed_layout: PackedLayout | None = None
    segments: SegmentPair | None = None
    shares_rows: bool = False

    def describe_calls(self) -> str:
        """How documents are kept apart, in words."""
        if self.packed_layout is not None:
            return f", one call for each of {len(self.packed_layout.documents)} documents"
        if self.shares_rows:
            return ", in rows of contiguous tokens"
        return ""


def find_distance_form(call: KernelCall, mask: Mask, *, dropout: float) -> DistanceForm:
    """What is known of distances in a call under this mask; weights with dropout are formed by few computations."""
    position = call.position
    # of one distance on either side: enough to see what kind of terms the position has
    terms = position.distance_terms(1, 1)
    offset, packed_layout = _find_offset(call, mask)
    if terms is None:
        return DistanceForm(None, None, offset, packed_layout)
    if _has_distance_vectors(position, terms):
        if offset is not None:
            return DistanceForm("vector", terms, offset, packed_layout)
        offset = _find_aligned_offset(call, mask)
        if offset is None:
            return DistanceForm(None, terms, None)
        return DistanceForm("vector", terms, offset, None, _segment_pair(call), shares_rows=True)
    form = DistanceForm(None, terms, offset, packed_layout)
    if offset is None or dropout:
        return form
    if not offset.causal and terms.lookahead < 1:
        return form
    if _is_plain_bias(terms):
        return form._replace(kind="bias")
    if position.max_distance is not None and position.max_distance < MAX_BAND_DISTANCE:
        return form._replace(kind="clipped")
    return form


def _is_plain_bias(terms: DistanceTerms) -> bool:
    """Whether the position only adds a number without gradient for each distance."""
    return terms.bias is not None and not terms.bias.requires_grad and terms.keys is None and terms.values is None


def _has_distance_vectors(position: Position, terms: DistanceTerms) -> bool:
    return position.max_distance is None and terms.keys is not None and terms.bias is None and terms.values is None


def _find_offset(call: KernelCall, mask: Mask) -> tuple[QueryOffset | None, PackedLayout | None]:
    """The offset of queries against keys, and the documents to compute separately, if the mask is by distance alone."""
    if not isinstance(mask, Causal | AllKeys):
        return None, None
    query_layout = call.query_positions.layout
    key_layout = call.key_positions.layout
    queries = call.q.shape[2]
    keys = call.k.shape[2]
    causal = isinstance(mask, Causal)
    if isinstance(query_layout, ContiguousLayout) and isinstance(key_layout, ContiguousLayout):
        offset = query_layout.start - key_layout.start
        # every query has a key at its own position
        if 0 <= offset <= keys - queries:
            return (QueryOffset(offset, causal), None)
        return (None, None)
    if not isinstance(query_layout, PackedLayout) or query_layout != key_layout or not query_layout.documents:
        return None, None
    # no valid token of a causal row sees padding on the right
    if causal and query_layout.right_padded:
        return QueryOffset(0, causal), None
    tokens = sum(end - begin for _, begin, end in query_layout.documents)
    are_short = tokens < MIN_DOCUMENT_LENGTH * len(query_layout.documents)
    if are_short:
        return (None, None)
    return (QueryOffset(0, causal), query_layout)


def _find_aligned_offset(call: KernelCall, mask: Mask) -> QueryOffset | None:
    """The offset of queries against keys in rows of contiguous tokens, whose positions may differ between rows."""
    query_positions = call.query_positions
    key_positions = call.key_positions
    query_layout = query_positions.layout
    key_layout = key_positions.layout
    aligned_layouts = ContiguousLayout, AlignedLayout
    if not isinstance(query_layout, aligned_layouts) or not isinstance(key_layout, aligned_layouts):
        return None
    if not isinstance(mask, Causal | AllKeys):
        return None
    offset = query_layout.start - key_layout.start
    max_offset = key_positions.segment_ids.shape[1] - query_positions.segment_ids.shape[1]
    if 0 <= offset <= max_offset:
        return QueryOffset(offset, isinstance(mask, Causal))
    return None


def _segment_pair(call: KernelCall) -> SegmentPair | None:
    """The segment ids of queries and keys; None if their values show that each row has a single document."""
    query_segments = call.query_positions.segment_ids
    key_segments = call.key_positions.segment_ids
    first_segment = key_segments[:, :1]
    if (
        is_readable(key_segments)
        and bool((key_segments == first_segment).all())
        and bool((query_segments == first_segment).all())
    ):
        return None
    return SegmentPair(query_segments, key_segments)


def compiled_bias(call: KernelCall, form: DistanceForm, *, scale: float) -> Tensor:
    """FlexAttention with a term for each distance."""
    q, k, v = call[:3]
    offset = form.offset
    assert offset is not None
    terms = _query_terms(call.position, offset, q.shape[2], k.shape[2])
    return flex_attention.flex_bias_attention(
        q, k, v, _score_terms(terms, q), terms.lookback, terms.lookahead, offset, scale=scale
    )


def by_distance(call: KernelCall, form: DistanceForm, *, scale: float, dropout: float) -> Tensor:
    """The form by distance of a position, in one call or in one for each document; only vectors allow dropout."""
    if form.kind == "vector":
        attend = partial(_distance_vectors, call.position, form, scale, dropout)
    else:
        attend = partial(_distance_terms, call.position, form, scale)
    q, k, v = call[:3]
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    if form.packed_layout is None:
        return attend(q, k, v)
    return softmax_attention.map_documents(q, k, v, form.packed_layout, attend)


def _distance_vectors(
    position: Position, form: DistanceForm, scale: float, dropout: float, q: Tensor, k: Tensor, v: Tensor
) -> Tensor:
    queries = q.shape[2]
    keys = k.shape[2]
    assert form.offset is not None
    # a causal call masks keys ahead, but within a block their scores are computed
    if form.offset.causal:
        max_ahead = distance_vector_attention.BLOCK
    else:
        max_ahead = keys - 1 - form.offset.offset
    terms = position.distance_terms(form.offset.offset + queries - 1, max_ahead)
    assert terms is not None
    assert terms.keys is not None
    return distance_vector_attention.distance_vector_attention(
        q,
        k,
        v,
        terms.keys.expand(q.shape[1], -1, -1),
        terms.query_bias,
        terms.lookback,
        form.offset,
        segments=form.segments,
        scale=scale,
        dropout=dropout,
    )


def _distance_terms(position: Position, form: DistanceForm, scale: float, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    assert form.offset is not None
    terms = _query_terms(position, form.offset, q.shape[2], k.shape[2])
    if form.kind == "bias":
        assert terms.bias is not None
        return toeplitz_attention.toeplitz_attention(q, k, v, terms.bias, terms.lookback, form.offset, scale=scale)
    reach = clipped_distance_attention.ClippedDistances(terms.lookback, terms.lookahead, *form.offset)
    return clipped_distance_attention.clipped_distance_attention(
        q, k, v, _score_terms(terms, q), terms.values, reach, scale=scale
    )


def visible_blocks_of_pairs(call: KernelCall, mask: Mask, plan: SparsePlan, *, scale: float, dropout: float) -> Tensor:
    """The definition in the blocks that the mask shows, with any position."""
    q, k, v, query_positions, key_positions, position, *_ = call
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    # a plan of all heads together shows what any of them may see: heads that differ need their own mask of pairs
    pair_mask = mask if mask.per_head else None
    scoring = tiled_attention.PairScoring(position, query_positions, key_positions, pair_mask, scale, dropout)
    return tiled_attention.tiled_attention(q, k, v, plan, scoring)


def blocks_of_queries(call: KernelCall, mask: Mask, *, scale: float, dropout: float) -> Tensor:
    """The definition, one block of queries at a time: any mask and position, memory linear in length.

    Scores and weights are computed again for the gradient, block by block.
    """
    query_positions = call.query_positions
    key_positions = call.key_positions
    num_keys = call.k.shape[2]
    query_layout = query_positions.layout
    key_layout = key_positions.layout
    offset = None
    if isinstance(query_layout, ContiguousLayout) and isinstance(key_layout, ContiguousLayout):
        offset = query_layout.start - key_layout.start

    def block(q: Tensor, k: Tensor, v: Tensor, begin: int) -> Tensor:
        queries = query_positions.columns(begin, begin + q.shape[2])
        keys = key_positions.columns(0, k.shape[2])
        block_call = call._replace(q=q, k=k, v=v, query_positions=queries, key_positions=keys)
        return block_call.softmax_reference(mask.dense(queries, keys, q.shape[1]), scale=scale, dropout=dropout)[0]

    parts = []
    for begin in range(0, call.q.shape[2], BLOCK):
        q = call.q[:, :, begin : begin + BLOCK]
        stop = num_keys
        if offset is not None and mask.causal:
            # no query of the block attends to later keys
            stop = min(max(begin + q.shape[2] + offset, 1), num_keys)
        k = call.k[:, :, :stop]
        v = call.v[:, :, :stop]
        parts.append(recompute_for_gradient(block, q, k, v, begin, dropout=dropout))
    return torch.cat(parts, dim=2)


def dense_mask(
    mask: Mask, query_positions: TokenPositions, key_positions: TokenPositions, heads: int
) -> Bool[Tensor, "b h l s"]:
    """The mask of all pairs, kept for the next calls if it is small and depends on layouts alone."""
    layout = query_positions.layout
    if isinstance(layout, ContiguousLayout) and isinstance(key_positions.layout, RingLayout):
        return visible_in_ring(mask, heads, key_positions)
    if isinstance(layout, StepLayout) and key_positions is layout.keys:
        masks = layout.masks
        key = (mask, heads)
        if key not in masks:
            masks[key] = mask.dense(query_positions, key_positions, heads)
        return masks[key]
    queries = query_positions.position_ids.shape[1]
    keys = key_positions.position_ids.shape[1]
    # asked first: an exported graph would be for lengths of one answer to the next question alone
    if is_traced():
        return mask.dense(query_positions, key_positions, heads)
    is_small = queries * keys <= MAX_CACHED_MASK_PAIRS and query_positions.position_ids.device.type == "cpu"
    if is_small and layout_is_complete(query_positions) and layout_is_complete(key_positions):
        return _cached_dense_mask(mask, heads, query_positions.layout, key_positions.layout, queries, keys)
    return mask.dense(query_positions, key_positions, heads)


@lru_cache(maxsize=64)
def _cached_dense_mask(
    mask: Mask,
    heads: int,
    query_layout: ContiguousLayout | PrefixedLayout,
    key_layout: ContiguousLayout | PrefixedLayout,
    queries: int,
    keys: int,
) -> Bool[Tensor, "1 h l s"]:
    return mask.dense(materialize(query_layout, queries), materialize(key_layout, keys), heads)


def _query_terms(position: Position, offset: QueryOffset, queries: int, keys: int) -> DistanceTerms:
    """The distance terms of all distances in this call, with at least one on either side."""
    if offset.causal:
        lookahead = 0
    else:
        lookahead = max(1, keys - 1 - offset.offset)
    terms = position.distance_terms(max(1, offset.offset + queries - 1), lookahead)
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
