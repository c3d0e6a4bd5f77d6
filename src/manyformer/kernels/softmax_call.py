"""A call of softmax attention with the facts by which its computation is chosen."""

from typing import Literal, NamedTuple

from manyformer.core import AlignedLayout, ContiguousLayout, PackedLayout
from manyformer.device_reads import is_readable
from manyformer.kernels.kernel import Kernel, KernelCall
from manyformer.masks import AllKeys, Causal, Mask, union
from manyformer.ops.distance_vector_blocks import SegmentPair
from manyformer.ops.plan_records import SparsePlan
from manyformer.ops.sparse_plan import make_sparse_plan
from manyformer.ops.toeplitz_attention import QueryOffset
from manyformer.position import Position
from manyformer.position.distance_terms import DistanceTerms

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
        return layout if layout.documents else None

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
        acts = f"acts on the {' and '.join(seams)} of each pair" if seams else "does not change scores"
        return f"{self.position_name} {acts}"

    @property
    def distance_calls(self) -> str:
        """How documents are kept apart in the distance form, in words."""
        form = self.distance_form
        if form.packed_layout is not None:
            return f", one call for each of {len(form.packed_layout.documents)} documents"
        return ", in rows of contiguous tokens" if form.shares_rows else ""


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
    query_layout, key_layout = softmax.call.query_positions.layout, softmax.call.key_positions.layout
    queries, keys, causal = softmax.queries, softmax.call.k.shape[2], softmax.is_causal
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
    query_positions, key_positions = softmax.call.query_positions, softmax.call.key_positions
    query_layout, key_layout = query_positions.layout, key_positions.layout
    aligned_layouts = ContiguousLayout, AlignedLayout
    if not isinstance(query_layout, aligned_layouts) or not isinstance(key_layout, aligned_layouts):
        return None
    if not softmax.has_plain_mask:
        return None
    offset = query_layout.start - key_layout.start
    max_offset = key_positions.segment_ids.shape[1] - query_positions.segment_ids.shape[1]
    return QueryOffset(offset, softmax.is_causal) if 0 <= offset <= max_offset else None


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
