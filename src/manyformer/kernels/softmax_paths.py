"""Which computation softmax attention takes for a call, and why: one table, read from the top."""

from collections.abc import Callable
from typing import Literal, NamedTuple

from torch import Tensor

from manyformer.core import ContiguousLayout, PackedLayout, StepLayout, no_watch
from manyformer.kernels import softmax_forms as forms
from manyformer.kernels.softmax_forms import BLOCK, MIN_DOCUMENT_LENGTH, SoftmaxCall
from manyformer.ops import distance_vector_attention, toeplitz_attention
from manyformer.ops.flex_attention import MIN_FLEX_QUERIES, MIN_FLEX_WIDTH, has_few_queries, has_flex_width
from manyformer.ops.sparse_plan import repays_planning
from manyformer.ops.static_layout import can_plan, has_roles_or_parts
from manyformer.system.devices import compiles_attention

SoftmaxPath = Literal["naive", "sdpa", "documents", "sparse", "blocked", "flex"]

MAX_REFERENCE_PAIRS = 128 * 128
"""At most this many (query, key) pairs use the definition where a position acts on scores."""

MAX_REFERENCE_QUERIES = 16
"""At most this many queries use the definition where the position has a form by distance, for any number of keys."""

MIN_PAIRS_FOR_PLAN = 1 << 17
"""With fewer (query, key) pairs, planning costs more than skipping masked blocks saves."""

ATTENTION_CALL = 20_000
"""Overhead of one attention call on a CPU, in (head, query, key) pairs."""


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


def _is_not_planned(softmax: SoftmaxCall) -> bool:
    if softmax.has_plain_mask or softmax.pairs < MIN_PAIRS_FOR_PLAN:
        return True
    return not can_plan(softmax.call.query_positions, softmax.call.key_positions)


FORCED = "forced"
DENSE = "the dense mask of {call.mask!r} for these positions"
ONE_BY_ONE = "{call.packing}, one call each"
WATCHED = "the weights are watched, and only this path forms them"

EVERY_CALL = (
    Row("naive", forms.definition, lambda s: s.path == "naive", FORCED),
    Refusal(lambda s: s.path != "auto" and _is_watched(s), f"path '{{call.path}}' cannot serve this call: {WATCHED}"),
    Row("naive", forms.definition, _is_watched, WATCHED),
)

STATIC_STEP = (
    Refusal(
        lambda s: s.path not in (("auto",) if s.acts_on_pairs else ("auto", "sdpa")),
        "path '{call.path}' cannot serve the static step of one token",
    ),
    Row(
        "naive",
        forms.definition,
        lambda s: s.acts_on_pairs,
        "one token, with the scores that {call.position_name} changes",
    ),
    Row("sdpa", forms.fused_with_mask, _always, "one token, with the mask {call.mask!r} of all columns"),
)

PAIRS = (
    Refusal(
        lambda s: s.path not in ("auto", "blocked", "flex"),
        "path '{call.path}' cannot serve this call: {call.seams}",
    ),
    Row(
        "naive",
        forms.definition,
        lambda s: s.path == "auto" and _compiles_bias(s) and has_few_queries(s.call.q),
        f"{{call.seams}}, and there are fewer than {MIN_FLEX_QUERIES} queries",
    ),
    Row(
        "flex",
        forms.compiled_bias,
        _compiles_bias,
        "{call.seams}: one compiled kernel that indexes its terms by distance",
    ),
    Refusal(
        lambda s: s.path == "flex",
        "path 'flex' needs a position that adds to scores by distance alone, no dropout of weights, "
        f"{MIN_FLEX_WIDTH} channels a head on a GPU, and one contiguous document under the mask Causal() or AllKeys(); "
        "here {call.seams}",
    ),
    Row("naive", forms.definition, _has_few_pairs, "{call.seams}, and there are few pairs"),
    Row(
        "blocked",
        forms.by_distance,
        lambda s: s.distance_form.kind == "vector",
        "{call.position_name} has a vector for each distance: computed in blocks of "
        f"{distance_vector_attention.BLOCK} queries, distance terms as a view{{call.distance_calls}}",
    ),
    Row(
        "blocked",
        forms.by_distance,
        lambda s: s.distance_form.kind == "bias",
        "{call.position_name} adds a number for each distance: one fused call per "
        f"{toeplitz_attention.BLOCK} queries, its bias a view of one vector{{call.distance_calls}}",
    ),
    Row(
        "blocked",
        forms.by_distance,
        lambda s: s.distance_form.kind == "clipped",
        "{call.position_name} clips distances: a band of close keys, fused calls for all other keys"
        "{call.distance_calls}",
    ),
    Row(
        "blocked",
        forms.visible_blocks_of_pairs,
        _pairs_repay_plan,
        "{call.seams}: computed in visible blocks for {call.plan_share:.0%} of the cost of all pairs, "
        "in {call.plan_blocks}",
    ),
    Row("blocked", forms.blocks_of_queries, _always, f"{{call.seams}}: computed in blocks of {BLOCK} queries"),
)

FORCED_UNDER_MASK = (
    Row(
        "documents",
        forms.each_document,
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
    Row("flex", forms.compiled_mask, lambda s: s.path == "flex", FORCED),
    Row("sparse", forms.visible_blocks, lambda s: s.path == "sparse", FORCED),
)

PLAIN_MASK = (
    Row("sdpa", forms.fused, _sees_all, "every key is visible"),
    Row("sdpa", forms.fused, _sees_past, "every key lies in the past"),
    Row("sdpa", forms.fused_causal, _is_aligned, "causal from the first token on, by torch's flag"),
    Row("sdpa", forms.fused_causal, _is_right_padded, "causal with padding on the right, which no token sees"),
)

ON_CPU = (
    Row("documents", forms.each_document, _documents_save_pairs, ONE_BY_ONE),
    Row("documents", forms.each_document, _documents_save_plans, ONE_BY_ONE),
    Row("sdpa", forms.fused_with_mask, _is_not_planned, DENSE),
    Row(
        "sdpa",
        forms.fused_with_mask,
        lambda s: not _repays_planning(s),
        f"{DENSE}: a sparse plan for each row would cost more than it saves",
    ),
    Row("sdpa", forms.fused_with_mask, lambda s: s.dropout > 0, f"{DENSE}, because dropout acts on the weights"),
    Row(
        "sparse",
        forms.visible_blocks,
        lambda s: s.plan_share < 1,
        "{call.mask!r} for {call.plan_share:.0%} of the cost of all pairs, in {call.plan_blocks}",
    ),
    Row("sdpa", forms.fused_with_mask, _always, f"{DENSE}, which has too few masked blocks for a sparse plan"),
)

ON_GPU = (
    Row(
        "sdpa",
        forms.fused_with_mask,
        lambda s: has_few_queries(s.call.q),
        f"{DENSE}: FlexAttention is for {MIN_FLEX_QUERIES} queries or more",
    ),
    Row(
        "sdpa",
        forms.fused_with_mask,
        lambda s: not has_flex_width(s.call.q, s.call.v),
        f"{DENSE}: FlexAttention needs {MIN_FLEX_WIDTH} channels a head",
    ),
    Row("flex", forms.compiled_mask, _always, "{call.mask!r} compiled, for its visible blocks"),
)

TABLE = (
    Section("any call", _always, EVERY_CALL),
    # only tensors know what one token sees, and its pairs are few
    Section(
        "the static step of one token", lambda s: isinstance(s.call.query_positions.layout, StepLayout), STATIC_STEP
    ),
    Section("scores or values that a position changes", lambda s: s.acts_on_pairs or s.path == "blocked", PAIRS),
    Section("a mask alone, by a forced path", lambda s: s.path != "auto", FORCED_UNDER_MASK),
    Section("a mask that torch's kernel needs no tensor for", lambda s: s.has_plain_mask, PLAIN_MASK),
    # leaving out pairs must save more than its calls cost
    Section("another mask on a CPU", lambda s: s.path == "auto" and s.is_on_cpu, ON_CPU),
    # blocks of pairs can be left out, but the weights that dropout acts on are not formed
    Section(
        "another mask on a GPU",
        lambda s: s.path == "auto" and compiles_attention(s.call.q.device) and not s.dropout,
        ON_GPU,
    ),
    Section("all other calls", _always, (Row("sdpa", forms.fused_with_mask, _always, DENSE),)),
)
"""All computations of softmax attention; a call takes the first row that applies to it."""
