"""Selection of the algorithm for softmax attention with a position that acts on scores or values."""

from typing import Literal, NamedTuple

from manyformer.core import AlignedLayout, ContiguousLayout, PackedLayout
from manyformer.costs.cost_model import COSTS
from manyformer.device_reads import is_readable
from manyformer.kernels.kernel import KernelCall
from manyformer.masks import AllKeys, Causal, Mask, union
from manyformer.ops import distance_vector_attention, toeplitz_attention
from manyformer.ops.distance_vector_blocks import SegmentPair
from manyformer.ops.flex_bias_attention import MIN_FLEX_QUERIES, MIN_FLEX_WIDTH, has_few_queries, has_flex_width
from manyformer.ops.plan_records import SparsePlan
from manyformer.ops.sparse_plan import make_sparse_plan, repays_planning
from manyformer.ops.static_layout import can_plan
from manyformer.ops.toeplitz_attention import QueryOffset
from manyformer.position import Position
from manyformer.position.distance_terms import DistanceTerms
from manyformer.system.devices import compiles_attention

BiasedSoftmaxForm = Literal["bias", "clipped", "shifted", "tiled", "pairwise"]

BLOCK = COSTS.pairwise_block
MAX_REFERENCE_PAIRS = COSTS.max_reference_pairs
MAX_REFERENCE_QUERIES = COSTS.max_reference_queries
MAX_BAND_DISTANCE = COSTS.max_band_distance
MIN_DOCUMENT_LENGTH = COSTS.min_document_length


class SoftmaxCall(NamedTuple):
    """A kernel call with the mask and numbers that the softmax applies to it."""

    call: KernelCall
    mask: Mask
    scale: float
    dropout: float


class BiasedSoftmaxPlan(NamedTuple):
    """A path and its reason; for a blocked path its form, and the query offset, of the call or of each document.

    With `packed_layout` documents are computed one by one. `segments` separate documents that are computed together in
    one row; `sparse_plan` are the visible blocks of the mask.
    """

    path: Literal["naive", "blocked", "flex"]
    reason: str
    form: BiasedSoftmaxForm = "pairwise"
    query_offset: QueryOffset | None = None
    packed_layout: PackedLayout | None = None
    segments: SegmentPair | None = None
    sparse_plan: SparsePlan | None = None


def select_plan(softmax: SoftmaxCall, path: str) -> BiasedSoftmaxPlan:
    """Select the cheapest exact plan that `path` allows. Raises ValueError if it allows none."""
    seams = f"{type(softmax.call.position).__name__} {_describe_seams(softmax.call.position)}"
    if path not in ("auto", "blocked", "flex"):
        raise ValueError(f"SoftmaxKernel: path '{path}' cannot serve this call: {seams}")
    q, k = softmax.call.q, softmax.call.k
    if path == "flex" or (path == "auto" and compiles_attention(q.device)):
        if (query_offset := _find_flex_offset(softmax)) is not None:
            if path == "auto" and has_few_queries(q):
                return BiasedSoftmaxPlan("naive", f"{seams}, and there are fewer than {MIN_FLEX_QUERIES} queries")
            return BiasedSoftmaxPlan(
                "flex", f"{seams}: one compiled kernel that indexes its terms by distance", query_offset=query_offset
            )
        if path == "flex":
            raise ValueError(
                f"SoftmaxKernel: path 'flex' needs a position that adds to scores by distance alone, no dropout of "
                f"weights, {MIN_FLEX_WIDTH} channels a head on a GPU, and one contiguous document under the mask "
                f"Causal() or AllKeys(); here {seams}"
            )
    plan = _select_blocked_plan(softmax, seams)
    queries, pairs = q.shape[2], q.shape[2] * k.shape[2]
    # the shifted form has a hand-written gradient and is faster than the definition for any number of pairs
    max_pairs = 0 if plan.form == "shifted" and q.device.type in ("cpu", "meta") else MAX_REFERENCE_PAIRS
    is_small = queries <= (BLOCK if plan.query_offset is None else MAX_REFERENCE_QUERIES) or pairs <= max_pairs
    if path == "auto" and is_small:
        return BiasedSoftmaxPlan("naive", f"{seams}, and there are few pairs")
    return plan


def _select_blocked_plan(softmax: SoftmaxCall, seams: str) -> BiasedSoftmaxPlan:
    position, segments = softmax.call.position, None
    query_offset, packed_layout = _find_offset(softmax)
    terms, name = position.distance_terms(1, 1), type(position).__name__
    calls = "" if packed_layout is None else f", one call for each of {len(packed_layout.documents)} documents"
    has_vectors = terms is not None and _has_distance_vectors(position, terms)
    if has_vectors and query_offset is None and (query_offset := _find_aligned_offset(softmax)) is not None:
        calls, segments = ", in rows of contiguous tokens", _segment_pair(softmax)
    if query_offset is None or terms is None:
        return _select_pairwise_plan(softmax, seams)
    if has_vectors:
        method = f"computed in blocks of {distance_vector_attention.BLOCK} queries, distance terms as a view"
        reason = f"{name} has a vector for each distance: {method}{calls}"
        return BiasedSoftmaxPlan("blocked", reason, "shifted", query_offset, packed_layout, segments)
    if softmax.dropout or not _is_narrow(position, terms, query_offset):
        return BiasedSoftmaxPlan("blocked", f"{seams}: computed in blocks of {BLOCK} queries")
    if is_plain_bias(terms):
        method = f"one fused call per {toeplitz_attention.BLOCK} queries, its bias a view of one vector"
        reason = f"{name} adds a number for each distance: {method}{calls}"
        return BiasedSoftmaxPlan("blocked", reason, "bias", query_offset, packed_layout)
    reason = f"{name} clips distances: a band of close keys, fused calls for all other keys{calls}"
    return BiasedSoftmaxPlan("blocked", reason, "clipped", query_offset, packed_layout)


def _select_pairwise_plan(softmax: SoftmaxCall, seams: str) -> BiasedSoftmaxPlan:
    """Blocks of queries with all keys, or only the visible blocks of the mask if that is cheaper."""
    q, k, _, query_positions, key_positions, *_ = softmax.call
    heads, queries, keys = q.shape[1], q.shape[2], k.shape[2]
    is_large = queries > BLOCK and queries * keys > MAX_REFERENCE_PAIRS
    if is_large and softmax.mask not in (Causal(), AllKeys()) and can_plan(query_positions, key_positions):
        # a position computes all heads at once, so all heads share one plan
        any_head = union(list(dict.fromkeys(softmax.mask.for_head(head) for head in range(heads))))
        planned = any_head, query_positions, key_positions, heads
        plan = make_sparse_plan(*planned) if repays_planning(*planned) else None
        if plan is not None and (share := plan.cost / (heads * queries * keys)) < 1:
            cost = f"{share:.0%} of the cost of all pairs"
            reason = f"{seams}: computed in visible blocks for {cost}, in {plan.describe()}"
            return BiasedSoftmaxPlan("blocked", reason, "tiled", sparse_plan=plan)
    return BiasedSoftmaxPlan("blocked", f"{seams}: computed in blocks of {BLOCK} queries")


def is_plain_bias(terms: DistanceTerms) -> bool:
    """Whether the position only adds a number without gradient for each distance."""
    return terms.bias is not None and not terms.bias.requires_grad and terms.keys is None and terms.values is None


def _has_distance_vectors(position: Position, terms: DistanceTerms) -> bool:
    return position.max_distance is None and terms.keys is not None and terms.bias is None and terms.values is None


def _is_narrow(position: Position, terms: DistanceTerms, query_offset: QueryOffset) -> bool:
    """Whether the band of distinct distances is narrow; its width does not matter for a bias without gradient."""
    if not query_offset.causal and terms.lookahead < 1:
        return False
    if is_plain_bias(terms):
        return True
    return position.max_distance is not None and position.max_distance < MAX_BAND_DISTANCE


def _find_offset(softmax: SoftmaxCall) -> tuple[QueryOffset | None, PackedLayout | None]:
    """The offset of queries against keys, and the documents to compute separately, if the mask is by distance alone."""
    query_layout, key_layout = softmax.call.query_positions.layout, softmax.call.key_positions.layout
    queries, keys, causal = softmax.call.q.shape[2], softmax.call.k.shape[2], softmax.mask == Causal()
    if not causal and softmax.mask != AllKeys():
        return None, None
    if isinstance(query_layout, ContiguousLayout) and isinstance(key_layout, ContiguousLayout):
        offset = query_layout.start - key_layout.start
        return (QueryOffset(offset, causal), None) if 0 <= offset <= keys - queries else (None, None)
    if not isinstance(query_layout, PackedLayout) or query_layout != key_layout or not query_layout.documents:
        return None, None
    # no valid token of a causal row sees padding on the right
    if causal and query_layout.right_padded:
        return QueryOffset(0, causal), None
    tokens = sum(end - begin for _, begin, end in query_layout.documents)
    are_short = tokens < MIN_DOCUMENT_LENGTH * len(query_layout.documents)
    return (None, None) if are_short else (QueryOffset(0, causal), query_layout)


def _find_aligned_offset(softmax: SoftmaxCall) -> QueryOffset | None:
    """The offset of queries against keys in rows of contiguous tokens, whose positions may differ between rows."""
    query_layout, key_layout = softmax.call.query_positions.layout, softmax.call.key_positions.layout
    causal, aligned_layouts = softmax.mask == Causal(), (ContiguousLayout, AlignedLayout)
    if not isinstance(query_layout, aligned_layouts) or not isinstance(key_layout, aligned_layouts):
        return None
    if not causal and softmax.mask != AllKeys():
        return None
    offset = query_layout.start - key_layout.start
    max_offset = softmax.call.key_positions.segment_ids.shape[1] - softmax.call.query_positions.segment_ids.shape[1]
    return QueryOffset(offset, causal) if 0 <= offset <= max_offset else None


def _segment_pair(softmax: SoftmaxCall) -> SegmentPair | None:
    """The segment ids of queries and keys; None if their values show that each row has a single document."""
    query_segments, key_segments = softmax.call.query_positions.segment_ids, softmax.call.key_positions.segment_ids
    first_segment = key_segments[:, :1]
    if (
        is_readable(key_segments)
        and bool((key_segments == first_segment).all())
        and bool((query_segments == first_segment).all())
    ):
        return None
    return SegmentPair(query_segments, key_segments)


def _find_flex_offset(softmax: SoftmaxCall) -> QueryOffset | None:
    """The query offset if FlexAttention supports the call; it does not form the weights that values need."""
    query_offset, packed_layout = _find_offset(softmax)
    terms = softmax.call.position.distance_terms(1, 1)
    if packed_layout is not None or terms is None or terms.values is not None or softmax.dropout:
        return None
    if not has_flex_width(softmax.call.q, softmax.call.v):
        return None
    # there would be as many distance terms as scores
    if _has_distance_vectors(softmax.call.position, terms):
        return None
    return query_offset


def _describe_seams(position: Position) -> str:
    seams = sorted(position.required_seams() & {"score", "value"})
    return f"acts on the {' and '.join(seams)} of each pair" if seams else "does not change scores"
