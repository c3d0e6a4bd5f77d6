"""Scaled dot-product softmax attention, computed on the fastest path that is exact for the call."""

import math
from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple, final, get_args

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from manyformer.core import (
    ContiguousLayout,
    LayerOutput,
    PackedLayout,
    State,
    StepLayout,
    TokenPositions,
    no_watch,
)
from manyformer.costs.cost_model import COSTS, tuned_costs
from manyformer.kernels.biased_softmax_plan import MIN_DOCUMENT_LENGTH, BiasedSoftmaxPlan, SoftmaxCall, select_plan
from manyformer.kernels.dense_masks import MIN_PAIRS_FOR_PLAN, dense_mask
from manyformer.kernels.distance_bias_step import bind_distance_bias
from manyformer.kernels.kernel import AttendStep, Kernel, KernelCall
from manyformer.kernels.softmax_with_bias import run_plan
from manyformer.masks import AllKeys, Causal, Mask
from manyformer.ops import block_sparse_attention, flex_mask_attention
from manyformer.ops import softmax_attention as ops
from manyformer.ops.flex_bias_attention import MIN_FLEX_QUERIES, MIN_FLEX_WIDTH, has_few_queries, has_flex_width
from manyformer.ops.plan_records import SparsePlan
from manyformer.ops.sparse_plan import make_sparse_plan, repays_planning
from manyformer.ops.static_layout import can_plan, has_roles_or_parts, materialize
from manyformer.position import NoPosition, Position
from manyformer.system.devices import compiles_attention

SoftmaxPath = Literal["naive", "sdpa", "documents", "sparse", "blocked", "flex"]

LENGTH_ROUNDING = {1: COSTS.short_document_rounding, MIN_PAIRS_FOR_PLAN: COSTS.long_document_rounding}


class SoftmaxPathChoice(NamedTuple):
    """A path and its reason; `causal`, `needs_dense_mask` and `sparse_plan` say how the mask is applied."""

    path: SoftmaxPath
    reason: str
    causal: bool = False
    needs_dense_mask: bool = False
    sparse_plan: SparsePlan | None = None
    biased_plan: BiasedSoftmaxPlan | None = None


ALL_VISIBLE = SoftmaxPathChoice("sdpa", "every key is visible")
PAST_ONLY = SoftmaxPathChoice("sdpa", "every key lies in the past")
ALIGNED = SoftmaxPathChoice("sdpa", "causal from the first token on, by torch's flag", causal=True)
RIGHT_PADDED = SoftmaxPathChoice("sdpa", "causal with padding on the right, which no token sees", causal=True)


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
        # read here, before a compiler may trace the calls
        tuned_costs()
        if path != "auto" and path not in get_args(SoftmaxPath):
            raise ValueError(
                f"SoftmaxKernel: path '{path}' does not exist; choose from auto, {', '.join(get_args(SoftmaxPath))}"
            )
        self.mask = self.cache_mask = AllKeys() if mask is None else mask
        self.dropout, self.scale, self.path = dropout, scale, path
        self._all, self._causal = self.mask == AllKeys(), self.mask == Causal()
        # compilers (until torch 2.11) cannot trace how a dataclass describes itself
        self._mask_words = repr(self.mask)

    def forward(self, call: KernelCall) -> LayerOutput:
        choice = self._select_path(call)
        q, k, v, query_positions, key_positions, _, state, _ = call
        scale = self._scale(q.shape[-1])
        dropout = self.dropout if self.training else 0.0
        if choice.path == "naive":
            mask = self.mask.dense(query_positions, key_positions, q.shape[1])
            y, weights = call.softmax_reference(mask, scale=scale, dropout=dropout)
            call.watch(self, "weights", weights)
            return LayerOutput(y, state)
        if choice.path == "documents":
            assert isinstance(query_positions.layout, PackedLayout)
            attend: Callable[[Tensor, Tensor, Tensor], Tensor] = self._attend_document
            if self._all or self._causal:
                attend = partial(ops.fused_attention, mask=None, causal=choice.causal, scale=scale, dropout=dropout)
            return LayerOutput(ops.map_documents(q, k, v, query_positions.layout, attend), state)
        if choice.biased_plan is not None:
            return LayerOutput(run_plan(choice.biased_plan, self._softmax_call(call)), state)
        if choice.sparse_plan is not None:
            y = block_sparse_attention.block_sparse_attention(q, k, v, choice.sparse_plan, scale=scale)
            return LayerOutput(y, state)
        if choice.path == "flex":
            y = flex_mask_attention.flex_mask_attention(q, k, v, self.mask, query_positions, key_positions, scale=scale)
            return LayerOutput(y, state)
        dense = dense_mask(self.mask, query_positions, key_positions, q.shape[1]) if choice.needs_dense_mask else None
        y = ops.fused_attention(q, k, v, dense, causal=choice.causal, scale=scale, dropout=dropout)
        return LayerOutput(y, state)

    def explain(self, call: KernelCall) -> str:
        choice = self._select_path(call)
        return f"{choice.path}: {choice.reason}{tuned_costs()[1].note}"

    def decode_attend(self, position: Position, *, heads: int, kv_heads: int, head_dim: int) -> AttendStep | None:
        scale, is_grouped = self._scale(head_dim), heads != kv_heads
        if position.required_seams() & {"score", "value"}:
            sees_every_key = self.path == "auto" and (self._causal or self._all)
            return bind_distance_bias(position, scale=scale, is_grouped=is_grouped) if sees_every_key else None
        if self.path not in ("auto", "sdpa"):
            return None
        attention = F.scaled_dot_product_attention

        def attend(
            q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, positions: TokenPositions, state: State
        ) -> tuple[Tensor, State]:
            return attention(q, k, v, visible, scale=scale, enable_gqa=is_grouped), state

        return AttendStep(attend, stateless=True)

    def decode_scale(self, head_dim: int) -> float | None:
        return self._scale(head_dim) if self.path == "auto" else None

    def extra_repr(self) -> str:
        return f"{self._mask_words}, path={self.path}"

    def _select_path(self, call: KernelCall) -> SoftmaxPathChoice:
        if self.path == "naive":
            return SoftmaxPathChoice("naive", "forced")
        if call.watch is not no_watch:
            reason = "the weights are watched, and only this path forms them"
            if self.path != "auto":
                raise ValueError(f"SoftmaxKernel: path '{self.path}' cannot serve this call: {reason}")
            return SoftmaxPathChoice("naive", reason)
        if isinstance(call.query_positions.layout, StepLayout):
            return self._select_step_path(call.position)
        if self.path == "blocked" or call.position.required_seams() & {"score", "value"}:
            biased = select_plan(self._softmax_call(call), self.path)
            return SoftmaxPathChoice(biased.path, biased.reason, biased_plan=biased if biased.path != "naive" else None)
        if self.path == "documents":
            packed = self._select_documents_path(call)
            if packed is None or not (self._all or self._causal):
                raise ValueError(
                    "SoftmaxKernel: path 'documents' needs packed self-attention with the mask Causal() or AllKeys()"
                )
            return packed._replace(reason="forced")
        drops_weights = self.training and self.dropout > 0
        if self.path in ("sparse", "flex"):
            if drops_weights:
                raise ValueError(f"SoftmaxKernel: path '{self.path}' does not form the weights that dropout acts on")
            if self.path == "flex" and not has_flex_width(call.q, call.v):
                raise ValueError(f"SoftmaxKernel: path 'flex' needs heads of {MIN_FLEX_WIDTH} channels or more")
            if self.path == "flex":
                return SoftmaxPathChoice("flex", "forced")
            plan = make_sparse_plan(self.mask, call.query_positions, call.key_positions, call.q.shape[1])
            return SoftmaxPathChoice("sparse", "forced", sparse_plan=plan)
        fused, device = self._select_sdpa_path(call), call.q.device
        # meta tensors are used to count the costs of a CPU
        if self.path == "auto" and fused.needs_dense_mask and device.type in ("cpu", "meta"):
            return self._select_cpu_path(fused, call)
        if self.path == "auto" and fused.needs_dense_mask and compiles_attention(device) and not drops_weights:
            return self._select_gpu_path(fused, call)
        return fused

    def _select_gpu_path(self, fused: SoftmaxPathChoice, call: KernelCall) -> SoftmaxPathChoice:
        """One compiled kernel, where there are enough queries for blocks of pairs to be left out."""
        if has_few_queries(call.q):
            return fused._replace(reason=f"{fused.reason}: FlexAttention is for {MIN_FLEX_QUERIES} queries or more")
        if not has_flex_width(call.q, call.v):
            return fused._replace(reason=f"{fused.reason}: FlexAttention needs {MIN_FLEX_WIDTH} channels a head")
        return SoftmaxPathChoice("flex", f"{self._mask_words} compiled, for its visible blocks")

    def _select_step_path(self, position: Position) -> SoftmaxPathChoice:
        """One token per row, whose visible keys only tensors know: the pairs are few, and none is left out."""
        has_scores = bool(position.required_seams() & {"score", "value"})
        if self.path not in (("auto",) if has_scores else ("auto", "sdpa")):
            raise ValueError(f"SoftmaxKernel: path '{self.path}' cannot serve the static step of one token")
        if has_scores:
            return SoftmaxPathChoice("naive", f"one token, with the scores that {type(position).__name__} changes")
        return SoftmaxPathChoice(
            "sdpa", f"one token, with the mask {self._mask_words} of all columns", needs_dense_mask=True
        )

    def _select_cpu_path(self, fused: SoftmaxPathChoice, call: KernelCall) -> SoftmaxPathChoice:
        """One call per document, or only visible blocks, where that saves more than the call overhead."""
        packed = self._select_documents_path(call)
        if not (self._all or self._causal):
            is_cheaper = packed is not None and self._is_cheaper_per_document(call.q, call.query_positions)
            return packed if packed and is_cheaper else self._select_sparse_path(fused, call)
        if packed is None:
            return fused
        layout = call.query_positions.layout
        assert isinstance(layout, PackedLayout)
        (rows, heads, queries, _), keys = call.q.shape, call.k.shape[2]
        saved_pairs = heads * (rows * queries * keys - sum((end - begin) ** 2 for _, begin, end in layout.documents))
        return packed if saved_pairs > tuned_costs()[0].attention_call * len(layout.documents) else fused

    def _is_cheaper_per_document(self, q: Tensor, query_positions: TokenPositions) -> bool:
        """Whether documents under a sparse mask are cheaper one by one than whole rows."""
        assert isinstance(query_positions.layout, PackedLayout)
        are_short = q.shape[0] * q.shape[2] < MIN_DOCUMENT_LENGTH * len(query_positions.layout.documents)
        return q.shape[2] ** 2 >= MIN_PAIRS_FOR_PLAN and not are_short and not has_roles_or_parts(query_positions)

    def _select_sparse_path(self, fused: SoftmaxPathChoice, call: KernelCall) -> SoftmaxPathChoice:
        """The sparse path, where its cost is below that of all pairs."""
        heads, pairs = call.q.shape[1], call.q.shape[2] * call.k.shape[2]
        planned = self.mask, call.query_positions, call.key_positions, heads
        if pairs < MIN_PAIRS_FOR_PLAN or not can_plan(call.query_positions, call.key_positions):
            return fused
        if not repays_planning(*planned):
            return fused._replace(reason=f"{fused.reason}: a sparse plan for each row would cost more than it saves")
        if self.training and self.dropout:
            return fused._replace(reason=f"{fused.reason}, because dropout acts on the weights")
        plan: SparsePlan = make_sparse_plan(*planned)
        share = plan.cost / (heads * pairs)
        if share >= 1:
            return fused._replace(reason=f"{fused.reason}, which has too few masked blocks for a sparse plan")
        reason = f"{self._mask_words} for {share:.0%} of the cost of all pairs, in {plan.describe()}"
        return SoftmaxPathChoice("sparse", reason, sparse_plan=plan)

    def _softmax_call(self, call: KernelCall) -> SoftmaxCall:
        return SoftmaxCall(call, self.mask, self._scale(call.q.shape[-1]), self.dropout if self.training else 0.0)

    def _scale(self, head_dim: int) -> float:
        return 1 / math.sqrt(head_dim) if self.scale is None else self.scale

    def _select_sdpa_path(self, call: KernelCall) -> SoftmaxPathChoice:
        """How torch's fused kernel applies the mask: not at all, by its causal flag, or as a dense mask."""
        query_layout, key_layout = call.query_positions.layout, call.key_positions.layout
        if isinstance(query_layout, ContiguousLayout) and isinstance(key_layout, ContiguousLayout):
            offset = query_layout.start - key_layout.start
            if self._all:
                return ALL_VISIBLE
            if self._causal and offset >= call.k.shape[2] - 1:
                return PAST_ONLY
            if self._causal and offset == 0:
                return ALIGNED
        # scanning the documents comes last, and only for a causal mask, where the result matters
        if (
            self._causal
            and isinstance(query_layout, PackedLayout)
            and query_layout == key_layout
            and query_layout.right_padded
        ):
            return RIGHT_PADDED
        return SoftmaxPathChoice(
            "sdpa", f"the dense mask of {self._mask_words} for these positions", needs_dense_mask=True
        )

    def _attend_document(
        self, q: Float[Tensor, "1 h l e"], k: Float[Tensor, "1 g l e"], v: Float[Tensor, "1 g l f"]
    ) -> Float[Tensor, "1 h l f"]:
        """Attention within one document of a packed row."""
        length = q.shape[2]
        multiple = max(multiple for pairs, multiple in LENGTH_ROUNDING.items() if length**2 >= pairs)
        padding = -length % multiple if self.mask.causal else 0
        q, k, v = (F.pad(x, (0, 0, 0, padding)) if padding else x for x in (q, k, v))
        positions = materialize(ContiguousLayout(), length + padding)
        y = self.forward(KernelCall(q, k, v, positions, positions, NoPosition())).y
        return y[:, :, :length]

    def _select_documents_path(self, call: KernelCall) -> SoftmaxPathChoice | None:
        layout = call.query_positions.layout
        # if all tokens are padding there is no document to compute
        if not isinstance(layout, PackedLayout) or layout is not call.key_positions.layout or not layout.documents:
            return None
        reason = f"{len(layout.documents)} documents in {call.q.shape[0]} packed rows, one call each"
        return SoftmaxPathChoice("documents", reason, causal=self._causal)
