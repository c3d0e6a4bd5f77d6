"""Softmax attention whose scores or values a position changes: which form serves a call, and the call itself."""

from typing import Literal, NamedTuple

from torch import Tensor

from manyformer.core import AlignedLayout, ContiguousLayout, PackedLayout, TokenPositions
from manyformer.masks import AllKeys, Causal, Mask, union
from manyformer.ops import (
    clipped_distance_attention,
    distance_vector_attention,
    flex_bias_attention,
    tiled_attention,
    toeplitz_attention,
)
from manyformer.ops.blocked_attention import BLOCK, blocked
from manyformer.ops.distance_vector_blocks import SegmentPair
from manyformer.ops.softmax_attention import each_document
from manyformer.ops.sparse_plan import SparsePlan as Blocks
from manyformer.ops.sparse_plan import make_sparse_plan
from manyformer.ops.static_layout import can_plan
from manyformer.ops.toeplitz_attention import QueryOffset
from manyformer.position import Position
from manyformer.position.distance_terms import DistanceTerms

BiasedSoftmaxForm = Literal["bias", "clipped", "shifted", "tiled", "written out"]

FEW_PAIRS = 128 * 128
"""So few pairs of a query and a key are written out at once."""

FEW_QUERIES = 16
"""So few queries are, whatever the number of keys."""

WIDEST = 1024
"""A position that tells more distances apart is written out in blocks: a band of near keys would be most of them."""

SHORT = 64
"""Packed documents of fewer tokens on average are cheaper together under a mask than one by one."""


class SoftmaxCall(NamedTuple):
    """One call of the kernel, but for the queries, keys and values."""

    mask: Mask
    query_positions: TokenPositions
    key_positions: TokenPositions
    position: Position
    scale: float
    dropout: float


class BiasedSoftmaxPlan(NamedTuple):
    """A path, and why; for a blocked one its form, and how queries lie against keys: in all, or in each document.

    `numbers` tell the documents apart where a row may hold several and they are taken together; `blocks` are what the
    mask shows.
    """

    path: Literal["naive", "blocked", "flex"]
    why: str
    form: BiasedSoftmaxForm = "written out"
    span: QueryOffset | None = None
    documents: PackedLayout | None = None
    numbers: SegmentPair | None = None
    blocks: Blocks | None = None


def select_plan(call: SoftmaxCall, q: Tensor, k: Tensor, path: str) -> BiasedSoftmaxPlan:
    """The cheapest plan that is exact, of those that `path` allows. Raises ValueError where it allows none."""
    acts = f"{type(call.position).__name__} {_acts(call.position)}"
    if path not in ("auto", "blocked", "flex"):
        raise ValueError(f"SoftmaxKernel: path '{path}' cannot serve this call: {acts}")
    if path == "flex" or (path == "auto" and q.device.type == "cuda"):
        if (span := _flexible(call, q, k)) is not None:
            return BiasedSoftmaxPlan(
                "flex", f"{acts}: one compiled kernel that looks its terms up by distance", span=span
            )
        if path == "flex":
            raise ValueError(
                f"SoftmaxKernel: path 'flex' needs a position that adds to scores by distance alone, no dropout of weights, "
                f"and one plain document under the mask Causal() or Everything(); here {acts}"
            )
    found = _blocked(call, q, k, acts)
    queries, pairs = q.shape[2], q.shape[2] * k.shape[2]
    # with its gradient written out, a block takes fewer operations than the definition however few its pairs
    least = 0 if found.form == "shifted" and q.device.type in ("cpu", "meta") else FEW_PAIRS
    few = queries <= (BLOCK if found.span is None else FEW_QUERIES) or pairs <= least
    if path == "auto" and few:
        return BiasedSoftmaxPlan("naive", f"{acts}, and there are few")
    return found


def _blocked(call: SoftmaxCall, q: Tensor, k: Tensor, acts: str) -> BiasedSoftmaxPlan:
    span, documents = _span(call, q.shape[2], k.shape[2])
    found = call.position.distance_terms(1, 1)
    name = type(call.position).__name__
    each = "" if documents is None else f", each of {len(documents.documents)} documents by itself"
    if span is None and found is not None and _is_shift(call.position, found) and (span := _lined(call)) is not None:
        how = (
            f"written out for {distance_vector_attention.BLOCK} queries at a time, what they get from distances a view"
        )
        why = f"{name} has a vector for each distance: {how}, in rows whose tokens stand side by side"
        return BiasedSoftmaxPlan("blocked", why, "shifted", span, numbers=_numbers(call))
    if span is None or found is None:
        return _by_pairs(call, q, k, acts)
    if _is_shift(call.position, found):
        how = (
            f"written out for {distance_vector_attention.BLOCK} queries at a time, what they get from distances a view"
        )
        return BiasedSoftmaxPlan(
            "blocked", f"{name} has a vector for each distance: {how}{each}", "shifted", span, documents
        )
    if call.dropout or not _narrow(call.position, found, span):
        return BiasedSoftmaxPlan("blocked", f"{acts}: written out for {BLOCK} queries at a time")
    if _is_plain_bias(found):
        how = f"a fused call for {toeplitz_attention.BLOCK} queries at a time, its mask a view of one short vector"
        return BiasedSoftmaxPlan(
            "blocked", f"{name} adds a number for each distance: {how}{each}", "bias", span, documents
        )
    how = "near keys written out, all others in fused calls"
    return BiasedSoftmaxPlan(
        "blocked", f"{name} takes keys beyond a distance for alike: {how}{each}", "clipped", span, documents
    )


def _by_pairs(call: SoftmaxCall, q: Tensor, k: Tensor, acts: str) -> BiasedSoftmaxPlan:
    """Written out for all keys, or only where the mask shows something, if that is less work."""
    heads, queries, keys = q.shape[1], q.shape[2], k.shape[2]
    many = queries > BLOCK and queries * keys > FEW_PAIRS
    if many and call.mask not in (Causal(), AllKeys()) and can_plan(call.query_positions, call.key_positions):
        # positions are asked about all heads at once
        seen = union(list(dict.fromkeys(call.mask.for_head(head) for head in range(heads))))
        found = make_sparse_plan(seen, call.query_positions, call.key_positions, heads)
        share = found.cost / (heads * queries * keys)
        if share < 1:
            why = f"{acts}: written out for {share:.0%} of the cost of all pairs, in {found.describe()}"
            return BiasedSoftmaxPlan("blocked", why, "tiled", blocks=found)
    return BiasedSoftmaxPlan("blocked", f"{acts}: written out for {BLOCK} queries at a time")


def run_plan(plan: BiasedSoftmaxPlan, call: SoftmaxCall, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Outputs (b, h, l, f) as planned."""
    span = plan.span
    if plan.blocks is not None:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        mask = call.mask if call.mask.per_head else None
        seams = tiled_attention.PositionSeams(
            call.position, call.query_positions, call.key_positions, mask, call.scale, call.dropout
        )
        return tiled_attention.attend(q, k, v, plan.blocks, seams)
    if span is None:
        return _written_out(call, q, k, v)
    if plan.path == "flex":
        found = _ask(call.position, span, q.shape[2], k.shape[2])
        return flex_bias_attention.attend(q, k, v, _terms(found, q), found.back, found.ahead, span, scale=call.scale)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if plan.form == "shifted":
            return _shifted(call, span, plan.numbers, q, k, v)
        return _by_distance(call, span, q, k, v)

    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    return attend(q, k, v) if plan.documents is None else each_document(q, k, v, plan.documents, attend)


def _written_out(call: SoftmaxCall, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    at, of = call.query_positions, call.key_positions
    keys = k.shape[2]
    plain = isinstance(at.layout, ContiguousLayout) and isinstance(of.layout, ContiguousLayout)
    ahead = at.layout.start - of.layout.start if plain else 0  # type: ignore[union-attr]

    def seen(end: int) -> int:
        return min(max(end + ahead, 1), keys) if plain and call.mask.causal else keys

    def dense(here: TokenPositions, there: TokenPositions) -> Tensor:
        return call.mask.dense(here, there, q.shape[1])

    words = {"scale": call.scale, "dropout": call.dropout}
    return blocked(q, k, v, dense, position=call.position, query_positions=at, key_positions=of, seen=seen, **words)


def _by_distance(call: SoftmaxCall, span: QueryOffset, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    found = _ask(call.position, span, q.shape[2], k.shape[2])
    if _is_plain_bias(found):
        assert found.bias is not None
        return toeplitz_attention.attend(q, k, v, found.bias, found.back, span, scale=call.scale)
    reach = clipped_distance_attention.ClippedDistances(found.back, found.ahead, span.offset, span.causal)
    return clipped_distance_attention.attend(q, k, v, _terms(found, q), found.values, reach, scale=call.scale)


def _shifted(
    call: SoftmaxCall, span: QueryOffset, numbers: SegmentPair | None, q: Tensor, k: Tensor, v: Tensor
) -> Tensor:
    queries, keys = q.shape[2], k.shape[2]
    # keys ahead are hidden in a causal call, but inside a block they are written out
    ahead = distance_vector_attention.BLOCK if span.causal else keys - 1 - span.offset
    found = call.position.distance_terms(span.offset + queries - 1, ahead)
    assert found is not None
    assert found.keys is not None
    vectors = found.keys.expand(q.shape[1], -1, -1)
    words = {"scale": call.scale, "dropout": call.dropout}
    return distance_vector_attention.attend(q, k, v, vectors, found.turn, found.back, span, numbers=numbers, **words)


def _ask(position: Position, span: QueryOffset, queries: int, keys: int) -> DistanceTerms:
    """The position at all distances that this call can meet; at least one on either side."""
    found = position.distance_terms(
        max(1, span.offset + queries - 1), 0 if span.causal else max(1, keys - 1 - span.offset)
    )
    assert found is not None
    return found


def _terms(found: DistanceTerms, q: Tensor) -> Tensor:
    """What is added to scores, (b, h, l, r) or less where queries are alike."""
    terms = q.new_zeros(1, 1, 1, found.back + found.ahead + 1)
    if found.bias is not None:
        terms = terms + found.bias[None, :, None]
    if found.keys is not None:
        terms = terms + q @ found.keys.mT
    return terms


def _is_plain_bias(found: DistanceTerms) -> bool:
    return found.bias is not None and not found.bias.requires_grad and found.keys is None and found.values is None


def _is_shift(position: Position, found: DistanceTerms) -> bool:
    return position.max_distance is None and found.keys is not None and found.bias is None and found.values is None


def _narrow(position: Position, found: DistanceTerms, span: QueryOffset) -> bool:
    """Whether few distances are told apart, or a bias without gradient, for which their number does not matter."""
    if not span.causal and found.ahead < 1:
        return False
    if _is_plain_bias(found):
        return True
    return position.max_distance is not None and position.max_distance < WIDEST


def _span(call: SoftmaxCall, queries: int, keys: int) -> tuple[QueryOffset | None, PackedLayout | None]:
    """How queries lie against keys, in the whole call or in each document, where a mask by distance alone serves."""
    at, of = call.query_positions.layout, call.key_positions.layout
    causal = call.mask == Causal()
    if not causal and call.mask != AllKeys():
        return None, None
    if isinstance(at, ContiguousLayout) and isinstance(of, ContiguousLayout):
        offset = at.start - of.start
        return (QueryOffset(offset, causal), None) if 0 <= offset <= keys - queries else (None, None)
    if not isinstance(at, PackedLayout) or at != of or not at.documents:
        return None, None
    # padding on the right is seen by no real token of a causal row
    if causal and at.right_padded:
        return QueryOffset(0, causal), None
    tokens = sum(end - begin for _, begin, end in at.documents)
    return (QueryOffset(0, causal), at) if tokens >= SHORT * len(at.documents) else (None, None)


def _lined(call: SoftmaxCall) -> QueryOffset | None:
    """How queries lie against keys in rows that may differ, but whose tokens all stand side by side."""
    at, of, causal = call.query_positions.layout, call.key_positions.layout, call.mask == Causal()
    if not isinstance(at, ContiguousLayout | AlignedLayout) or not isinstance(of, ContiguousLayout | AlignedLayout):
        return None
    if not causal and call.mask != AllKeys():
        return None
    offset = at.start - of.start
    return (
        QueryOffset(offset, causal)
        if 0 <= offset <= call.key_positions.segment_ids.shape[1] - call.query_positions.segment_ids.shape[1]
        else None
    )


def _numbers(call: SoftmaxCall) -> SegmentPair | None:
    """The numbers of the documents, where reading them does not tell that each row has a single one."""
    at, of = call.query_positions.segment_ids, call.key_positions.segment_ids
    alone = of.device.type == "cpu" and bool((of == of[:, :1]).all()) and bool((at == of[:, :1]).all())
    return None if alone else SegmentPair(at, of)


def _flexible(call: SoftmaxCall, q: Tensor, k: Tensor) -> QueryOffset | None:
    """How queries lie against keys where FlexAttention can serve: it never forms the weights that values need."""
    span, documents = _span(call, q.shape[2], k.shape[2])
    found = call.position.distance_terms(1, 1)
    if documents is not None or found is None or found.values is not None or call.dropout:
        return None
    # the terms of all distances for each query would be as many as the scores
    if _is_shift(call.position, found):
        return None
    return span


def _acts(position: Position) -> str:
    seams = sorted(position.required_seams() & {"score", "value"})
    return f"acts on the {' and '.join(seams)} of each pair" if seams else "leaves scores alone"
