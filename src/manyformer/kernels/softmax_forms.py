"""A call of softmax attention with the facts by which its computation is chosen, and these computations."""

from functools import lru_cache, partial
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from manyformer.core import (
    AlignedLayout,
    ContiguousLayout,
    PackedLayout,
    PrefixedLayout,
    RingLayout,
    StepLayout,
    TokenPositions,
)
from manyformer.device_reads import is_readable
from manyformer.kernels.kernel import Kernel, KernelCall
from manyformer.masks import AllKeys, Causal, Mask, union
from manyformer.masks.eviction import visible_in_ring
from manyformer.ops import (
    block_sparse_attention,
    clipped_distance_attention,
    distance_vector_attention,
    flex_attention,
    softmax_attention,
    tiled_attention,
    toeplitz_attention,
)
from manyformer.ops.distance_vector_attention import SegmentPair
from manyformer.ops.sparse_plan import SparsePlan, make_sparse_plan
from manyformer.ops.static_layout import layout_is_complete, materialize
from manyformer.ops.toeplitz_attention import QueryOffset
from manyformer.position import NoPosition, Position
from manyformer.position.position import DistanceTerms
from manyformer.recompute import recompute_for_gradient

MAX_BAND_DISTANCE = 1024
"""A position with at least this many distances is computed in blocks: the band would be too wide."""

MIN_DOCUMENT_LENGTH = 64
"""Packed documents of fewer tokens on average are cheaper in one masked call than in one call each."""


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


class SoftmaxCall:
    """A call of a kernel, the mask and the numbers that the kernel applies to it, and facts about them.

    `path` is the one that the kernel forces, or "auto". Facts that cost something are found when they are first asked
    for, and kept for the computation."""

    def __init__(
        self, kernel: Kernel, call: KernelCall, *, mask: Mask, scale: float, dropout: float, path: str
    ) -> None:
        self.kernel = kernel
        self.call = call
        self.mask = mask
        self.scale = scale
        self.dropout = dropout
        self.path = path
        pair_seams = call.position.overridden & {"score", "value"}
        # a position made of others overrides all seams, and knows which of them it needs
        self.acts_on_pairs = bool(pair_seams and pair_seams & call.position.required_seams())
        self.is_causal = isinstance(mask, Causal)
        self.sees_all_keys = isinstance(mask, AllKeys)
        self.has_plain_mask = self.is_causal or self.sees_all_keys
        self._sparse_plan: SparsePlan | None = None
        self._distance_form: DistanceForm | None = None

    @property
    def is_on_cpu(self) -> bool:
        """Whether the paths of a CPU are taken: meta tensors are used to count its costs."""
        return self.call.q.device.type in ("cpu", "meta")

    @property
    def queries(self) -> int:
        """The number of queries of a row."""
        return self.call.q.shape[2]

    @property
    def pairs(self) -> int:
        """The number of (query, key) pairs of a head and a row."""
        return self.queries * self.call.k.shape[2]

    @property
    def documents(self) -> PackedLayout | None:
        """The documents of packed rows that attend to themselves; None if there is none to compute."""
        layout = self.call.query_positions.layout
        if not isinstance(layout, PackedLayout) or layout is not self.call.key_positions.layout:
            return None
        if layout.documents:
            return layout
        return None

    @property
    def packing(self) -> str:
        """The documents in words."""
        assert self.documents is not None
        return f"{len(self.documents.documents)} documents in {self.call.q.shape[0]} packed rows"

    @property
    def planned_mask(self) -> Mask:
        """The mask whose visible blocks are planned: of all heads together where a position computes them at once."""
        if self.path != "blocked" and not self.acts_on_pairs:
            return self.mask
        return union(list(dict.fromkeys(self.mask.for_head(head) for head in range(self.call.q.shape[1]))))

    @property
    def sparse_plan(self) -> SparsePlan:
        """The visible blocks of the mask."""
        if self._sparse_plan is None:
            call = self.call
            self._sparse_plan = make_sparse_plan(
                self.planned_mask, call.query_positions, call.key_positions, call.q.shape[1]
            )
        return self._sparse_plan

    @property
    def plan_share(self) -> float:
        """The cost of the plan as a share of that of all pairs."""
        return self.sparse_plan.cost / (self.call.q.shape[1] * self.pairs)

    @property
    def plan_blocks(self) -> str:
        """The plan in words."""
        return self.sparse_plan.describe()

    @property
    def distance_form(self) -> DistanceForm:
        """What is known of distances."""
        if self._distance_form is None:
            self._distance_form = _find_distance_form(self)
        return self._distance_form

    @property
    def position_name(self) -> str:
        """The class of the position."""
        return type(self.call.position).__name__

    @property
    def seams(self) -> str:
        """The position in words."""
        seams = sorted(self.call.position.required_seams() & {"score", "value"})
        acts = "does not change scores"
        if seams:
            acts = f"acts on the {' and '.join(seams)} of each pair"
        return f"{self.position_name} {acts}"

    @property
    def distance_calls(self) -> str:
        """How documents are kept apart in the distance form, in words."""
        form = self.distance_form
        if form.packed_layout is not None:
            return f", one call for each of {len(form.packed_layout.documents)} documents"
        if form.shares_rows:
            return ", in rows of contiguous tokens"
        return ""


def _find_distance_form(softmax: SoftmaxCall) -> DistanceForm:
    position = softmax.call.position
    terms = position.distance_terms(1, 1)
    offset, packed_layout = _find_offset(softmax)
    if terms is None:
        return DistanceForm(None, None, offset, packed_layout)
    if _has_distance_vectors(position, terms):
        if offset is not None:
            return DistanceForm("vector", terms, offset, packed_layout)
        offset = _find_aligned_offset(softmax)
        if offset is None:
            return DistanceForm(None, terms, None)
        return DistanceForm("vector", terms, offset, None, _segment_pair(softmax), shares_rows=True)
    form = DistanceForm(None, terms, offset, packed_layout)
    if offset is None or softmax.dropout:
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


def _find_offset(softmax: SoftmaxCall) -> tuple[QueryOffset | None, PackedLayout | None]:
    """The offset of queries against keys, and the documents to compute separately, if the mask is by distance alone."""
    if not softmax.has_plain_mask:
        return None, None
    query_layout = softmax.call.query_positions.layout
    key_layout = softmax.call.key_positions.layout
    queries = softmax.queries
    keys = softmax.call.k.shape[2]
    causal = softmax.is_causal
    if isinstance(query_layout, ContiguousLayout) and isinstance(key_layout, ContiguousLayout):
        offset = query_layout.start - key_layout.start
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


def _find_aligned_offset(softmax: SoftmaxCall) -> QueryOffset | None:
    """The offset of queries against keys in rows of contiguous tokens, whose positions may differ between rows."""
    query_positions = softmax.call.query_positions
    key_positions = softmax.call.key_positions
    query_layout = query_positions.layout
    key_layout = key_positions.layout
    aligned_layouts = ContiguousLayout, AlignedLayout
    if not isinstance(query_layout, aligned_layouts) or not isinstance(key_layout, aligned_layouts):
        return None
    if not softmax.has_plain_mask:
        return None
    offset = query_layout.start - key_layout.start
    max_offset = key_positions.segment_ids.shape[1] - query_positions.segment_ids.shape[1]
    if 0 <= offset <= max_offset:
        return QueryOffset(offset, softmax.is_causal)
    return None


def _segment_pair(softmax: SoftmaxCall) -> SegmentPair | None:
    """The segment ids of queries and keys; None if their values show that each row has a single document."""
    query_segments = softmax.call.query_positions.segment_ids
    key_segments = softmax.call.key_positions.segment_ids
    first_segment = key_segments[:, :1]
    if (
        is_readable(key_segments)
        and bool((key_segments == first_segment).all())
        and bool((query_segments == first_segment).all())
    ):
        return None
    return SegmentPair(query_segments, key_segments)


BLOCK = 128
"""Queries per block where a position acts on each pair."""

MAX_CACHED_MASK_PAIRS = 1 << 17
"""Dense masks of layouts with at most so many pairs are kept for the next calls."""

LENGTH_ROUNDING = {1: 32, 1 << 17: 128}
"""Under a causal mask the length of a document is padded to a multiple of this, by its number of pairs: equal lengths
share a mask, and long ones a plan."""


def definition(softmax: SoftmaxCall) -> Tensor:
    """Scores and weights of all pairs, written out."""
    call = softmax.call
    mask = softmax.mask.dense(call.query_positions, call.key_positions, call.q.shape[1])
    y, weights = call.softmax_reference(mask, scale=softmax.scale, dropout=softmax.dropout)
    call.watch(softmax.kernel, "weights", weights)
    return y


def fused(softmax: SoftmaxCall) -> Tensor:
    """Torch's kernel without a mask."""
    return _fused(softmax, None, causal=False)


def fused_causal(softmax: SoftmaxCall) -> Tensor:
    """Torch's kernel with its causal flag."""
    return _fused(softmax, None, causal=True)


def fused_with_mask(softmax: SoftmaxCall) -> Tensor:
    """Torch's kernel with a dense mask."""
    call = softmax.call
    mask = _dense_mask(softmax.mask, call.query_positions, call.key_positions, call.q.shape[1])
    return _fused(softmax, mask, causal=False)


def _fused(softmax: SoftmaxCall, mask: Bool[Tensor, "b h l s"] | None, *, causal: bool) -> Tensor:
    q, k, v = softmax.call[:3]
    return softmax_attention.fused_attention(q, k, v, mask, causal=causal, scale=softmax.scale, dropout=softmax.dropout)


def each_document(softmax: SoftmaxCall) -> Tensor:
    """One call for each document of packed rows: of torch's kernel, or of this one under a mask of few keys."""
    call = softmax.call
    assert isinstance(call.query_positions.layout, PackedLayout)
    attend = partial(_attend_document, softmax)
    if softmax.has_plain_mask:
        attend = partial(
            softmax_attention.fused_attention,
            mask=None,
            causal=softmax.is_causal,
            scale=softmax.scale,
            dropout=softmax.dropout,
        )
    return softmax_attention.map_documents(call.q, call.k, call.v, call.query_positions.layout, attend)


def _attend_document(
    softmax: SoftmaxCall, q: Float[Tensor, "1 h l e"], k: Float[Tensor, "1 g l e"], v: Float[Tensor, "1 g l f"]
) -> Float[Tensor, "1 h l f"]:
    """Attention within one document of a packed row."""
    length = q.shape[2]
    multiple = max(multiple for pairs, multiple in LENGTH_ROUNDING.items() if length**2 >= pairs)
    padding = -length % multiple if softmax.mask.causal else 0
    if padding:
        q, k, v = (F.pad(x, (0, 0, 0, padding)) for x in (q, k, v))
    positions = materialize(ContiguousLayout(), length + padding)
    y = softmax.kernel.forward(KernelCall(q, k, v, positions, positions, NoPosition())).y
    return y[:, :, :length]


def visible_blocks(softmax: SoftmaxCall) -> Tensor:
    """Only the blocks that the mask shows, on a CPU."""
    q, k, v = softmax.call[:3]
    return block_sparse_attention.block_sparse_attention(q, k, v, softmax.sparse_plan, scale=softmax.scale)


def compiled_mask(softmax: SoftmaxCall) -> Tensor:
    """FlexAttention under any mask."""
    q, k, v, query_positions, key_positions, *_ = softmax.call
    return flex_attention.flex_mask_attention(
        q, k, v, softmax.mask, query_positions, key_positions, scale=softmax.scale
    )


def compiled_bias(softmax: SoftmaxCall) -> Tensor:
    """FlexAttention with a term for each distance."""
    q, k, v = softmax.call[:3]
    offset = softmax.distance_form.offset
    assert offset is not None
    terms = _query_terms(softmax.call.position, offset, q.shape[2], k.shape[2])
    return flex_attention.flex_bias_attention(
        q, k, v, _score_terms(terms, q), terms.lookback, terms.lookahead, offset, scale=softmax.scale
    )


def by_distance(softmax: SoftmaxCall) -> Tensor:
    """The `distance_form` of a position, in one call or in one for each document."""
    form = softmax.distance_form
    attend = partial(_distance_vectors if form.kind == "vector" else _distance_terms, softmax)
    q, k, v = softmax.call[:3]
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    if form.packed_layout is None:
        return attend(q, k, v)
    return softmax_attention.map_documents(q, k, v, form.packed_layout, attend)


def _distance_vectors(softmax: SoftmaxCall, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    form = softmax.distance_form
    queries = q.shape[2]
    keys = k.shape[2]
    assert form.offset is not None
    # a causal call masks keys ahead, but within a block their scores are computed
    if form.offset.causal:
        max_ahead = distance_vector_attention.BLOCK
    else:
        max_ahead = keys - 1 - form.offset.offset
    terms = softmax.call.position.distance_terms(form.offset.offset + queries - 1, max_ahead)
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
        scale=softmax.scale,
        dropout=softmax.dropout,
    )


def _distance_terms(softmax: SoftmaxCall, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    form = softmax.distance_form
    scale = softmax.scale
    assert form.offset is not None
    terms = _query_terms(softmax.call.position, form.offset, q.shape[2], k.shape[2])
    if form.kind == "bias":
        assert terms.bias is not None
        return toeplitz_attention.toeplitz_attention(q, k, v, terms.bias, terms.lookback, form.offset, scale=scale)
    reach = clipped_distance_attention.ClippedDistances(terms.lookback, terms.lookahead, *form.offset)
    return clipped_distance_attention.clipped_distance_attention(
        q, k, v, _score_terms(terms, q), terms.values, reach, scale=scale
    )


def visible_blocks_of_pairs(softmax: SoftmaxCall) -> Tensor:
    """The definition in the blocks that the mask shows, with any position."""
    q, k, v, query_positions, key_positions, position, *_ = softmax.call
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    mask = softmax.mask if softmax.mask.per_head else None
    seams = tiled_attention.PositionSeams(
        position, query_positions, key_positions, mask, softmax.scale, softmax.dropout
    )
    return tiled_attention.tiled_attention(q, k, v, softmax.sparse_plan, seams)


def blocks_of_queries(softmax: SoftmaxCall) -> Tensor:
    """The definition, one block of queries at a time: any mask and position, memory linear in length.

    Scores and weights are computed again for the gradient, block by block.
    """
    call = softmax.call
    mask = softmax.mask
    scale = softmax.scale
    dropout = softmax.dropout
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


def _dense_mask(
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
    is_small = queries * keys <= MAX_CACHED_MASK_PAIRS and query_positions.position_ids.device.type == "cpu"
    is_complete = is_small and layout_is_complete(query_positions) and layout_is_complete(key_positions)
    if is_complete and not torch.compiler.is_compiling():
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
