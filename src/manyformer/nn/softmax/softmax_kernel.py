"""Scaled dot-product softmax attention, computed on the fastest path that is exact for the call.

`TABLE` says which computation a call takes, and why; it is read from the top. Its conditions are facts of a
`SoftmaxCall`, whose methods are the computations. An ordinary call goes from here to torch's kernel by
`fused_attention`; `softmax_forms` has what positions that act on pairs need, and dense masks.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple, final, get_args

import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from manyformer.nn.core import ContiguousLayout, LayerOutput, PackedLayout, StepLayout, no_watch
from manyformer.nn.kernels.kernel import Kernel, KernelCall, TokenRing
from manyformer.nn.masks.local import Causal
from manyformer.nn.masks.mask import AllKeys, Mask, union
from manyformer.nn.ops.softmax_attention import fused_attention, map_documents
from manyformer.nn.ops.static_layout import can_plan, has_roles_or_parts, materialize
from manyformer.nn.positions.position import NoPosition
from manyformer.nn.runtime.devices import compiles_attention
from manyformer.nn.runtime.handwritten_gradient import hides_values, needs_plain_operations
from manyformer.nn.softmax import distance_vector_attention, softmax_forms, toeplitz_attention
from manyformer.nn.softmax.block_sparse_attention import block_sparse_attention
from manyformer.nn.softmax.flex_attention import (
    MIN_FLEX_QUERIES,
    MIN_FLEX_WIDTH,
    flex_mask_attention,
    has_few_queries,
    has_flex_width,
)
from manyformer.nn.softmax.ring_attention import ring_attention
from manyformer.nn.softmax.softmax_forms import BLOCK, MIN_DOCUMENT_LENGTH, DistanceForm, dense_mask, find_distance_form
from manyformer.nn.softmax.sparse_plan import SparsePlan, make_sparse_plan, repays_planning

SoftmaxPath = Literal["naive", "sdpa", "documents", "sparse", "blocked", "flex"]

MAX_REFERENCE_PAIRS = 128 * 128
"""At most this many (query, key) pairs use the definition where a position acts on scores."""

MAX_REFERENCE_QUERIES = 16
"""At most this many queries use the definition where the position has a form by distance, for any number of keys."""

MIN_PAIRS_FOR_PLAN = 1 << 17
"""With fewer (query, key) pairs, planning costs more than skipping masked blocks saves."""

ATTENTION_CALL = 20_000
"""Overhead of one attention call on a CPU, in (head, query, key) pairs."""

FORCED = "forced"

DENSE = "the dense mask of {call.mask!r} for these positions"
PLAIN = "only operations of torch have all derivatives, and no plan is made of what tensors hold"

ONE_BY_ONE = "{call.packing}, one call each"

WATCHED = "the weights are watched, and only this path forms them"

LENGTH_ROUNDING = {1: 32, 1 << 17: 128}
"""Under a causal mask the length of a document is padded to a multiple of this, by its number of pairs: equal lengths
share a mask, and long ones a plan."""


class SoftmaxCall:
    """A call of a kernel with the mask and the numbers that the kernel applies to it: facts about it, and computations.

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
        pair_methods = call.position.overridden & {"score", "value"}
        # a position made of others overrides all methods, and knows which of them it needs
        self.acts_on_pairs = bool(pair_methods and pair_methods & call.position.required_seams())
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
        # blocks of one head are cheaper, but a position scores the pairs of all heads in one call
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
            self._distance_form = find_distance_form(self.call, self.mask, dropout=self.dropout)
        return self._distance_form

    @property
    def position_name(self) -> str:
        """The class of the position."""
        return type(self.call.position).__name__

    @property
    def position_effect(self) -> str:
        """The position in words."""
        stages = sorted(self.call.position.required_seams() & {"score", "value"})
        acts = "does not change scores"
        if stages:
            acts = f"acts on the {' and '.join(stages)} of each pair"
        return f"{self.position_name} {acts}"

    @property
    def distance_calls(self) -> str:
        """How documents are kept apart in the distance form, in words."""
        return self.distance_form.describe_calls()

    def definition(self) -> Tensor:
        """Scores and weights of all pairs, written out."""
        call = self.call
        mask = self.mask.dense(call.query_positions, call.key_positions, call.q.shape[1])
        y, weights = call.softmax_reference(mask, scale=self.scale, dropout=self.dropout)
        call.watch(self.kernel, "weights", weights)
        return y

    def fused(self) -> Tensor:
        """Torch's kernel without a mask."""
        return self._fused(None, causal=False)

    def fused_causal(self) -> Tensor:
        """Torch's kernel with its causal flag."""
        return self._fused(None, causal=True)

    def fused_with_mask(self) -> Tensor:
        """Torch's kernel with a dense mask."""
        call = self.call
        mask = dense_mask(self.mask, call.query_positions, call.key_positions, call.q.shape[1])
        return self._fused(mask, causal=False)

    def _fused(self, mask: Bool[Tensor, "b h l s"] | None, *, causal: bool) -> Tensor:
        q, k, v = self.call[:3]
        return fused_attention(q, k, v, mask, causal=causal, scale=self.scale, dropout=self.dropout)

    def each_document(self) -> Tensor:
        """One call for each document of packed rows: of torch's kernel, or of this one under a mask of few keys."""
        call = self.call
        assert isinstance(call.query_positions.layout, PackedLayout)
        attend: Callable[[Tensor, Tensor, Tensor], Tensor] = self._attend_document
        if self.has_plain_mask:
            attend = partial(fused_attention, mask=None, causal=self.is_causal, scale=self.scale, dropout=self.dropout)
        return map_documents(call.q, call.k, call.v, call.query_positions.layout, attend)

    def _attend_document(
        self, q: Float[Tensor, "1 h l e"], k: Float[Tensor, "1 g l e"], v: Float[Tensor, "1 g l f"]
    ) -> Float[Tensor, "1 h l f"]:
        """Attention within one document of a packed row."""
        length = q.shape[2]
        multiple = max(multiple for pairs, multiple in LENGTH_ROUNDING.items() if length**2 >= pairs)
        # no token sees what follows it: under other masks it would see the padding
        padding = -length % multiple if self.mask.causal else 0
        if padding:
            q, k, v = (F.pad(x, (0, 0, 0, padding)) for x in (q, k, v))
        positions = materialize(ContiguousLayout(), length + padding)
        y = self.kernel.forward(KernelCall(q, k, v, positions, positions, NoPosition())).y
        return y[:, :, :length]

    def visible_blocks(self) -> Tensor:
        """Only the blocks that the mask shows, on a CPU."""
        q, k, v = self.call[:3]
        return block_sparse_attention(q, k, v, self.sparse_plan, scale=self.scale)

    def compiled_mask(self) -> Tensor:
        """FlexAttention under any mask."""
        q, k, v, query_positions, key_positions, *_ = self.call
        return flex_mask_attention(q, k, v, self.mask, query_positions, key_positions, scale=self.scale)

    def compiled_bias(self) -> Tensor:
        """FlexAttention with a term for each distance."""
        return softmax_forms.compiled_bias(self.call, self.distance_form, scale=self.scale)

    def by_distance(self) -> Tensor:
        """The `distance_form` of the position."""
        return softmax_forms.by_distance(self.call, self.distance_form, scale=self.scale, dropout=self.dropout)

    def visible_blocks_of_pairs(self) -> Tensor:
        """The definition in the blocks that the mask shows, with any position."""
        return softmax_forms.visible_blocks_of_pairs(
            self.call, self.mask, self.sparse_plan, scale=self.scale, dropout=self.dropout
        )

    def blocks_of_queries(self) -> Tensor:
        """The definition, one block of queries at a time: any mask and position."""
        return softmax_forms.blocks_of_queries(self.call, self.mask, scale=self.scale, dropout=self.dropout)


class Row(NamedTuple):
    """The computation of calls to which `applies`, and why: `{call.mask}` in the reason is an attribute of the call."""

    path: SoftmaxPath
    compute: Callable[[SoftmaxCall], Tensor]
    applies: Callable[[SoftmaxCall], bool]
    reason: str

    def explain(self, softmax: SoftmaxCall) -> str:
        """The path, and the reason for one call."""
        return f"{self.path}: {self.reason.format(call=softmax)}"


class Refusal(NamedTuple):
    """Calls that the path which the kernel forces cannot serve."""

    applies: Callable[[SoftmaxCall], bool]
    reason: str


class Section(NamedTuple):
    """Rows for one kind of calls; a call that none of them serves goes on to the next section."""

    title: str
    applies: Callable[[SoftmaxCall], bool]
    rows: tuple[Row | Refusal, ...]


def _always(softmax: SoftmaxCall) -> bool:
    return True


def _is_watched(softmax: SoftmaxCall) -> bool:
    return softmax.call.watch is not no_watch


def _compiles_bias(softmax: SoftmaxCall) -> bool:
    """FlexAttention adds terms by distance in one document; it forms no weights, which values and dropout act on."""
    if softmax.path != "flex" and not (softmax.path == "auto" and compiles_attention(softmax.call.q.device)):
        return False
    form = softmax.distance_form
    if form.terms is None or form.terms.values is not None or softmax.dropout:
        return False
    # with a vector for each distance there would be as many terms as scores
    if form.offset is None or form.packed_layout is not None or form.kind == "vector":
        return False
    return has_flex_width(softmax.call.q, softmax.call.v)


def _has_few_pairs(softmax: SoftmaxCall) -> bool:
    """Blocks are for many queries and many pairs; forms by distance for a few more than a block's."""
    if softmax.path != "auto":
        return False
    kind = softmax.distance_form.kind
    # that of vectors has a hand-written gradient and is faster than the definition for any number of pairs
    if kind == "vector" and softmax.is_on_cpu:
        max_pairs = 0
    else:
        max_pairs = MAX_REFERENCE_PAIRS
    # without a form by distance, blocks begin to pay beyond one block of queries
    max_queries = BLOCK if kind is None else MAX_REFERENCE_QUERIES
    return softmax.queries <= max_queries or softmax.pairs <= max_pairs


def _pairs_repay_plan(softmax: SoftmaxCall) -> bool:
    call = softmax.call
    if softmax.queries <= BLOCK or softmax.pairs <= MAX_REFERENCE_PAIRS or softmax.has_plain_mask:
        return False
    if not can_plan(call.query_positions, call.key_positions) or not _repays_planning(softmax):
        return False
    return softmax.plan_share < 1


def _repays_planning(softmax: SoftmaxCall) -> bool:
    call = softmax.call
    return repays_planning(softmax.planned_mask, call.query_positions, call.key_positions, call.q.shape[1])


def _starts(softmax: SoftmaxCall) -> tuple[int, int] | None:
    """The first positions of queries and keys that are contiguous in every row."""
    query_layout = softmax.call.query_positions.layout
    key_layout = softmax.call.key_positions.layout
    if isinstance(query_layout, ContiguousLayout) and isinstance(key_layout, ContiguousLayout):
        return query_layout.start, key_layout.start
    return None


def _sees_all(softmax: SoftmaxCall) -> bool:
    return softmax.sees_all_keys and _starts(softmax) is not None


def _sees_past(softmax: SoftmaxCall) -> bool:
    starts = _starts(softmax) if softmax.is_causal else None
    return starts is not None and starts[0] - starts[1] >= softmax.call.k.shape[2] - 1


def _is_aligned(softmax: SoftmaxCall) -> bool:
    starts = _starts(softmax) if softmax.is_causal else None
    return starts is not None and starts[0] == starts[1]


def _is_right_padded(softmax: SoftmaxCall) -> bool:
    layout = softmax.call.query_positions.layout
    if not softmax.is_causal or not isinstance(layout, PackedLayout):
        return False
    return layout == softmax.call.key_positions.layout and layout.right_padded


def _documents_save_pairs(softmax: SoftmaxCall) -> bool:
    """Whether the pairs between documents cost more than a call for each."""
    layout = softmax.documents
    if layout is None or not softmax.has_plain_mask:
        return False
    rows, heads = softmax.call.q.shape[:2]
    # one masked call would also compute the pairs between documents
    own_pairs = sum((end - begin) ** 2 for _, begin, end in layout.documents)
    return heads * (rows * softmax.pairs - own_pairs) > ATTENTION_CALL * len(layout.documents)


def _documents_save_plans(softmax: SoftmaxCall) -> bool:
    """Whether documents under a mask of few keys are cheaper one by one than whole rows."""
    layout = softmax.documents
    if layout is None or softmax.has_plain_mask:
        return False
    are_short = softmax.call.q.shape[0] * softmax.queries < MIN_DOCUMENT_LENGTH * len(layout.documents)
    return (
        softmax.queries**2 >= MIN_PAIRS_FOR_PLAN
        and not are_short
        and not has_roles_or_parts(softmax.call.query_positions)
    )


def _needs_plain_operations(softmax: SoftmaxCall) -> bool:
    if softmax.is_on_cpu:
        return hides_values()
    return needs_plain_operations()


def _is_not_planned(softmax: SoftmaxCall) -> bool:
    if softmax.has_plain_mask or softmax.pairs < MIN_PAIRS_FOR_PLAN:
        return True
    return not can_plan(softmax.call.query_positions, softmax.call.key_positions)


EVERY_CALL = (
    Row("naive", SoftmaxCall.definition, lambda s: s.path == "naive", FORCED),
    Refusal(lambda s: s.path != "auto" and _is_watched(s), f"path '{{call.path}}' cannot serve this call: {WATCHED}"),
    Row("naive", SoftmaxCall.definition, _is_watched, WATCHED),
)

STATIC_STEP = (
    Refusal(
        lambda s: s.path not in (("auto",) if s.acts_on_pairs else ("auto", "sdpa")),
        "path '{call.path}' cannot serve the static step of one token",
    ),
    Row(
        "naive",
        SoftmaxCall.definition,
        lambda s: s.acts_on_pairs,
        "one token, with the scores that {call.position_name} changes",
    ),
    Row("sdpa", SoftmaxCall.fused_with_mask, _always, "one token, with the mask {call.mask!r} of all columns"),
)

PLAIN_PAIRS = (Row("naive", SoftmaxCall.definition, _always, f"{{call.position_effect}}: {PLAIN}"),)

PLAIN_DENSE = (Row("sdpa", SoftmaxCall.fused_with_mask, _always, f"{DENSE}: {PLAIN}"),)

PAIRS = (
    Refusal(
        lambda s: s.path not in ("auto", "blocked", "flex"),
        "path '{call.path}' cannot serve this call: {call.position_effect}",
    ),
    Row(
        "naive",
        SoftmaxCall.definition,
        lambda s: s.path == "auto" and _compiles_bias(s) and has_few_queries(s.call.q),
        f"{{call.position_effect}}, and there are fewer than {MIN_FLEX_QUERIES} queries",
    ),
    Row(
        "flex",
        SoftmaxCall.compiled_bias,
        _compiles_bias,
        "{call.position_effect}: one compiled kernel that indexes its terms by distance",
    ),
    Refusal(
        lambda s: s.path == "flex",
        "path 'flex' needs a position that adds to scores by distance alone, no dropout of weights, "
        f"{MIN_FLEX_WIDTH} channels a head on a GPU, and one contiguous document under the mask Causal() or AllKeys(); "
        "here {call.position_effect}",
    ),
    Row("naive", SoftmaxCall.definition, _has_few_pairs, "{call.position_effect}, and there are few pairs"),
    Row(
        "blocked",
        SoftmaxCall.by_distance,
        lambda s: s.distance_form.kind == "vector",
        "{call.position_name} has a vector for each distance: computed in blocks of "
        f"{distance_vector_attention.BLOCK} queries, distance terms as a view{{call.distance_calls}}",
    ),
    Row(
        "blocked",
        SoftmaxCall.by_distance,
        lambda s: s.distance_form.kind == "bias",
        "{call.position_name} adds a number for each distance: one fused call per "
        f"{toeplitz_attention.BLOCK} queries, its bias a view of one vector{{call.distance_calls}}",
    ),
    Row(
        "blocked",
        SoftmaxCall.by_distance,
        lambda s: s.distance_form.kind == "clipped",
        "{call.position_name} clips distances: a band of close keys, fused calls for all other keys"
        "{call.distance_calls}",
    ),
    Row(
        "blocked",
        SoftmaxCall.visible_blocks_of_pairs,
        _pairs_repay_plan,
        "{call.position_effect}: computed in visible blocks for {call.plan_share:.0%} of the cost of all pairs, "
        "in {call.plan_blocks}",
    ),
    Row(
        "blocked",
        SoftmaxCall.blocks_of_queries,
        _always,
        f"{{call.position_effect}}: computed in blocks of {BLOCK} queries",
    ),
)

FORCED_UNDER_MASK = (
    Row(
        "documents",
        SoftmaxCall.each_document,
        lambda s: s.path == "documents" and s.documents is not None and s.has_plain_mask,
        FORCED,
    ),
    Refusal(
        lambda s: s.path == "documents",
        "path 'documents' needs packed self-attention with the mask Causal() or AllKeys()",
    ),
    Refusal(
        lambda s: s.path in ("sparse", "flex") and s.dropout > 0,
        "path '{call.path}' does not form the weights that dropout acts on",
    ),
    Refusal(
        lambda s: s.path == "flex" and not has_flex_width(s.call.q, s.call.v),
        f"path 'flex' needs heads of {MIN_FLEX_WIDTH} channels or more",
    ),
    Row("flex", SoftmaxCall.compiled_mask, lambda s: s.path == "flex", FORCED),
    Row("sparse", SoftmaxCall.visible_blocks, lambda s: s.path == "sparse", FORCED),
)

PLAIN_MASK = (
    Row("sdpa", SoftmaxCall.fused, _sees_all, "every key is visible"),
    Row("sdpa", SoftmaxCall.fused, _sees_past, "every key lies in the past"),
    Row("sdpa", SoftmaxCall.fused_causal, _is_aligned, "causal from the first token on, by torch's flag"),
    Row("sdpa", SoftmaxCall.fused_causal, _is_right_padded, "causal with padding on the right, which no token sees"),
)

ON_CPU = (
    Row("documents", SoftmaxCall.each_document, _documents_save_pairs, ONE_BY_ONE),
    Row("documents", SoftmaxCall.each_document, _documents_save_plans, ONE_BY_ONE),
    Row("sdpa", SoftmaxCall.fused_with_mask, _is_not_planned, DENSE),
    Row(
        "sdpa",
        SoftmaxCall.fused_with_mask,
        lambda s: not _repays_planning(s),
        f"{DENSE}: a sparse plan for each row would cost more than it saves",
    ),
    Row("sdpa", SoftmaxCall.fused_with_mask, lambda s: s.dropout > 0, f"{DENSE}, because dropout acts on the weights"),
    Row(
        "sparse",
        SoftmaxCall.visible_blocks,
        lambda s: s.plan_share < 1,
        "{call.mask!r} for {call.plan_share:.0%} of the cost of all pairs, in {call.plan_blocks}",
    ),
    Row("sdpa", SoftmaxCall.fused_with_mask, _always, f"{DENSE}, which has too few masked blocks for a sparse plan"),
)

ON_GPU = (
    Row(
        "sdpa",
        SoftmaxCall.fused_with_mask,
        lambda s: has_few_queries(s.call.q),
        f"{DENSE}: FlexAttention is for {MIN_FLEX_QUERIES} queries or more",
    ),
    Row(
        "sdpa",
        SoftmaxCall.fused_with_mask,
        lambda s: not has_flex_width(s.call.q, s.call.v),
        f"{DENSE}: FlexAttention needs {MIN_FLEX_WIDTH} channels a head",
    ),
    Row("flex", SoftmaxCall.compiled_mask, _always, "{call.mask!r} compiled, for its visible blocks"),
)

TABLE = (
    Section("any call", _always, EVERY_CALL),
    # only tensors know what one token sees, and its pairs are few
    Section(
        "the static step of one token", lambda s: isinstance(s.call.query_positions.layout, StepLayout), STATIC_STEP
    ),
    # no plan can be made of what tensors hold, and no handwritten gradient can be used
    Section("pairs in plain operations", lambda s: s.acts_on_pairs and _needs_plain_operations(s), PLAIN_PAIRS),
    Section("scores or values that a position changes", lambda s: s.acts_on_pairs or s.path == "blocked", PAIRS),
    Section("a mask alone, by a forced path", lambda s: s.path != "auto", FORCED_UNDER_MASK),
    Section("a mask that torch's kernel needs no tensor for", lambda s: s.has_plain_mask, PLAIN_MASK),
    Section("another mask in plain operations", _needs_plain_operations, PLAIN_DENSE),
    # leaving out pairs must save more than its calls cost
    Section("another mask on a CPU", lambda s: s.path == "auto" and s.is_on_cpu, ON_CPU),
    # blocks of pairs can be left out, but the weights that dropout acts on are not formed
    Section(
        "another mask on a GPU",
        lambda s: s.path == "auto" and compiles_attention(s.call.q.device) and not s.dropout,
        ON_GPU,
    ),
    Section("all other calls", _always, (Row("sdpa", SoftmaxCall.fused_with_mask, _always, DENSE),)),
)
"""All computations of softmax attention; a call takes the first row that applies to it."""


def choose(softmax: SoftmaxCall) -> Row:
    """The first row that applies. Raises ValueError if the kernel forces a path that cannot serve the call."""
    for section in TABLE:
        if section.applies(softmax):
            for row in section.rows:
                if row.applies(softmax):
                    if isinstance(row, Refusal):
                        raise ValueError(f"SoftmaxKernel: {row.reason.format(call=softmax)}")
                    return row
    raise AssertionError("the last row of the table serves every call")


@final
class SoftmaxKernel(Kernel):
    """Scaled dot-product attention (Vaswani et al. 2017, section 3.2.1) under a mask.

    The scale is 1 / sqrt(e) by default. A token that sees no key gets zeros; outputs of padding are undefined.
    `dropout` acts on the weights; torch's fast CPU kernel does not support it, so the default is 0. `path` forces a
    path: "naive" (any mask and position, the definition), "sdpa" (torch's fused kernel), "documents" (packed rows on a
    CPU, one call for each document), "sparse" (only the blocks that the mask shows, without dropout of weights),
    "blocked" (any mask and position, one block of queries at a time, so that memory is linear in length) or "flex"
    (masks, and positions that add to scores by distance, in one compiled kernel; chosen only on CUDA, because it has no
    gradient on a CPU, and from 128 queries on, because it makes a block mask for each call). Raises ValueError if a
    forced path does not support a call.
    """

    supports = frozenset({"query", "key", "score", "value"})

    def __init__(
        self,
        mask: Mask | None = None,
        *,
        dropout: float = 0.0,
        scale: float | None = None,
        path: Literal["auto"] | SoftmaxPath = "auto",
    ) -> None:
        super().__init__()
        if path != "auto" and path not in get_args(SoftmaxPath):
            raise ValueError(
                f"SoftmaxKernel: path '{path}' does not exist; choose from auto, {', '.join(get_args(SoftmaxPath))}"
            )
        self.mask = self.cache_mask = AllKeys() if mask is None else mask
        self.dropout = dropout
        self.scale = scale
        self.path = path

    def forward(self, call: KernelCall) -> LayerOutput:
        softmax = self._softmax_call(call)
        return LayerOutput(choose(softmax).compute(softmax), call.state)

    def explain(self, call: KernelCall) -> str:
        softmax = self._softmax_call(call)
        return choose(softmax).explain(softmax)

    def drop_weights(self, probability: float) -> bool:
        self.dropout = probability
        return True

    def column_obstacle(self) -> str | None:
        if self.dropout:
            return "attention_dropout needs the weights of all keys"
        return None

    def share_columns(self, ring: TokenRing) -> None:
        def forward(call: KernelCall) -> LayerOutput:
            scale = self.score_scale(call.q.shape[-1])
            # keys of other processes are never here together: only their log-sum-exps can be merged
            y = ring_attention(call.q, call.k, call.v, call.query_positions, self.mask, ring, scale=scale)
            return LayerOutput(y, call.state)

        self.forward = forward  # type: ignore[method-assign]
        self.explain = lambda call: f"ring: keys visit {ring.size} processes"  # type: ignore[method-assign]

    def extra_repr(self) -> str:
        return f"{self.mask!r}, path={self.path}"

    def _softmax_call(self, call: KernelCall) -> SoftmaxCall:
        dropout = self.dropout if self.training else 0.0
        scale = self.score_scale(call.q.shape[-1])
        return SoftmaxCall(self, call, mask=self.mask, scale=scale, dropout=dropout, path=self.path)

    def score_scale(self, head_dim: int) -> float:
        """What scores are multiplied by."""
        if self.scale is None:
            return 1 / math.sqrt(head_dim)
        return self.scale


@final
class LengthSwitchedKernel(Kernel):
    """Softmax attention under a mask in rows of more than `full_length` tokens, and to all keys in shorter rows.

    The released code of BigBird (Zaheer et al. 2020, arXiv:2007.14062) computes it so. The length is that of the row
    with its padding, so the outputs for a short text depend on the length of the longest text beside it."""

    supports = SoftmaxKernel.supports
    switches_by_length = True

    def __init__(self, mask: Mask, full_length: int) -> None:
        super().__init__()
        self.full_length = full_length
        self.full = SoftmaxKernel()
        self.sparse = SoftmaxKernel(mask)

    def forward(self, call: KernelCall) -> LayerOutput:
        output: LayerOutput = self._kernel_for(call)(call)
        return output

    def explain(self, call: KernelCall) -> str:
        return self._kernel_for(call).explain(call)

    def extra_repr(self) -> str:
        return f"full_length={self.full_length}"

    def _kernel_for(self, call: KernelCall) -> SoftmaxKernel:
        if call.k.shape[2] <= self.full_length:
            return self.full
        return self.sparse
