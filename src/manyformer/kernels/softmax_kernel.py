"""Softmax of scaled dot products, on the fastest path that is exact for the call at hand."""

import math
from functools import lru_cache
from typing import Literal, NamedTuple, final, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from manyformer.core import (
    ContiguousLayout,
    LayerOutput,
    PackedLayout,
    PrefixedLayout,
    State,
    TokenPositions,
    WatchFn,
    no_watch,
)
from manyformer.kernels import softmax_with_bias
from manyformer.kernels.kernel import Kernel
from manyformer.kernels.softmax_with_bias import SHORT
from manyformer.kernels.softmax_with_bias import BiasedSoftmaxPlan as Scored
from manyformer.masks import AllKeys, Causal, Mask
from manyformer.ops import block_sparse_attention, flex_mask_attention
from manyformer.ops import softmax_attention as ops
from manyformer.ops.sparse_plan import SparsePlan, make_sparse_plan
from manyformer.ops.static_layout import can_plan, has_roles_or_parts, layout_is_complete, materialize
from manyformer.position import NoPosition, Position

SoftmaxPath = Literal["naive", "sdpa", "documents", "sparse", "blocked", "flex"]

PAIRS_PER_CALL = 20_000
"""Starting one more attention call on a CPU costs about as much as this many (head, query, key) pairs."""


WORTH_A_PLAN = 1 << 17
"""Fewer (query, key) pairs than this are never worth looking for those that a mask leaves out."""


LENGTH_ROUNDING = {1: 32, WORTH_A_PLAN: 128}
"""Documents of so many (query, key) pairs or more are taken for a multiple of so many tokens under a causal mask.

No token sees what is added, and documents of nearly one length share a mask or a plan.
"""


class SoftmaxPathChoice(NamedTuple):
    """A path and the reason for it; `causal`, `needs_dense_mask` and `make_sparse_plan` say how its mask is respected."""

    path: SoftmaxPath
    why: str
    causal: bool = False
    needs_dense_mask: bool = False
    plan: SparsePlan | None = None
    scored: Scored | None = None


ALL_VISIBLE = SoftmaxPathChoice("sdpa", "every key is visible")
PAST_ONLY = SoftmaxPathChoice("sdpa", "every key lies in the past")
ALIGNED = SoftmaxPathChoice("sdpa", "causal from the first token on, torch's own flag", causal=True)
RIGHT_PADDED = SoftmaxPathChoice("sdpa", "causal with padding on the right, which no token sees", causal=True)


@final
class SoftmaxKernel(Kernel):
    """Scaled dot-product attention (Vaswani et al. 2017, section 3.2.1) under a mask.

    The scale is 1 / sqrt(e) unless given. A token that may see no key gets zeros; what padding gets means nothing.
    `dropout` acts on the weights; it makes torch leave its fast CPU kernel, so it is 0 unless asked for. `path` forces
    one way of computing: "naive" (any mask, any position, the definition), "sdpa" (torch's fused kernel), "documents"
    (packed rows on a CPU, one call each), "sparse" (only the blocks that the mask shows, no dropout of weights),
    "blocked" (any mask and position, a block of queries at a time, so that memory is linear in length) or "flex"
    (masks, and positions that add to scores by distance, in one compiled kernel; chosen on CUDA alone, as it has no
    gradient on a CPU). A forced path that cannot serve a call raises ValueError.
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
                f"SoftmaxKernel: path '{path}' does not exist; known: auto, {', '.join(get_args(SoftmaxPath))}"
            )
        self.mask = self.cache_mask = AllKeys() if mask is None else mask
        self.dropout, self.scale, self.path = dropout, scale, path
        self._all, self._causal = self.mask == AllKeys(), self.mask == Causal()

    def forward(
        self,
        q: Float[Tensor, "b h l e"],
        k: Float[Tensor, "b g s e"],
        v: Float[Tensor, "b g s f"],
        query_positions: TokenPositions,
        key_positions: TokenPositions,
        position: Position,
        state: State = None,
        watch: WatchFn = no_watch,
    ) -> LayerOutput:
        choice = self._choose(q, k, query_positions, key_positions, position, watch)
        scale = self._scale(q)
        dropout = self.dropout if self.training else 0.0
        if choice.path == "naive":
            mask = self.mask.dense(query_positions, key_positions, q.shape[1])
            y, weights = ops.naive(
                q,
                k,
                v,
                mask,
                scale=scale,
                dropout=dropout,
                position=position,
                query_positions=query_positions,
                key_positions=key_positions,
            )
            watch(self, "weights", weights)
            return LayerOutput(y, state)
        if choice.path == "documents":
            assert isinstance(query_positions.layout, PackedLayout)
            if not (self._all or self._causal):
                return LayerOutput(ops.each_document(q, k, v, query_positions.layout, self._document), state)
            return LayerOutput(
                ops.per_document(q, k, v, query_positions.layout, causal=choice.causal, scale=scale, dropout=dropout),
                state,
            )
        if choice.scored is not None:
            return LayerOutput(
                softmax_with_bias.run_plan(
                    choice.scored, self._call(q, query_positions, key_positions, position), q, k, v
                ),
                state,
            )
        if choice.plan is not None:
            return LayerOutput(block_sparse_attention.attend(q, k, v, choice.plan, scale=scale), state)
        if choice.path == "flex":
            return LayerOutput(
                flex_mask_attention.attend(q, k, v, self.mask, query_positions, key_positions, scale=scale), state
            )
        dense = _written_out(self.mask, query_positions, key_positions, q.shape[1]) if choice.needs_dense_mask else None
        return LayerOutput(ops.fused(q, k, v, dense, causal=choice.causal, scale=scale, dropout=dropout), state)

    def explain(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        query_positions: TokenPositions,
        key_positions: TokenPositions,
        position: Position,
        state: State = None,
        watch: WatchFn = no_watch,
    ) -> str:
        choice = self._choose(q, k, query_positions, key_positions, position, watch)
        return f"{choice.path}: {choice.why}"

    def extra_repr(self) -> str:
        return f"{self.mask!r}, path={self.path}"

    def _choose(
        self,
        q: Tensor,
        k: Tensor,
        query_positions: TokenPositions,
        key_positions: TokenPositions,
        position: Position,
        watch: WatchFn,
    ) -> SoftmaxPathChoice:
        if self.path == "naive":
            return SoftmaxPathChoice("naive", "forced")
        if watch is not no_watch:
            needs = "the weights are watched, and only the written-out form has them"
            if self.path != "auto":
                raise ValueError(f"SoftmaxKernel: path '{self.path}' cannot serve this call: {needs}")
            return SoftmaxPathChoice("naive", needs)
        if self.path == "blocked" or position.required_seams() & {"score", "value"}:
            found = softmax_with_bias.select_plan(
                self._call(q, query_positions, key_positions, position), q, k, self.path
            )
            return SoftmaxPathChoice(found.path, found.why, scored=found if found.path != "naive" else None)
        if self.path == "documents":
            packed = self._documents(q, query_positions, key_positions)
            if packed is None or not (self._all or self._causal):
                raise ValueError(
                    "SoftmaxKernel: path 'documents' needs packed self-attention with the mask Causal() or Everything()"
                )
            return packed._replace(why="forced")
        dropped = self.training and self.dropout > 0
        if self.path in ("sparse", "flex"):
            if dropped:
                raise ValueError(f"SoftmaxKernel: path '{self.path}' never forms the weights that dropout is to act on")
            blocks = (
                make_sparse_plan(self.mask, query_positions, key_positions, q.shape[1])
                if self.path == "sparse"
                else None
            )
            return SoftmaxPathChoice(self.path, "forced", plan=blocks)
        fused = self._fused(k, query_positions, key_positions)
        # what is computed without numbers tells the costs of a CPU
        if self.path == "auto" and fused.needs_dense_mask and q.device.type in ("cpu", "meta"):
            return self._cheaper(fused, q, k, query_positions, key_positions)
        if self.path == "auto" and fused.needs_dense_mask and q.device.type == "cuda" and not dropped:
            return SoftmaxPathChoice("flex", f"{self.mask!r} compiled, for the blocks that it shows")
        return fused

    def _cheaper(
        self,
        fused: SoftmaxPathChoice,
        q: Tensor,
        k: Tensor,
        query_positions: TokenPositions,
        key_positions: TokenPositions,
    ) -> SoftmaxPathChoice:
        """One call for each document, or only for visible blocks, where that saves more than starting calls costs."""
        packed = self._documents(q, query_positions, key_positions)
        if not (self._all or self._causal):
            return (
                packed
                if packed and self._apart(q, query_positions)
                else self._sparse(fused, q, k, query_positions, key_positions)
            )
        if packed is None:
            return fused
        assert isinstance(query_positions.layout, PackedLayout)
        saved = q.shape[1] * (q.shape[0] * q.shape[2] * k.shape[2] - _pairs(query_positions.layout))
        return packed if saved > PAIRS_PER_CALL * len(query_positions.layout.documents) else fused

    def _apart(self, q: Tensor, query_positions: TokenPositions) -> bool:
        """Whether documents under a sparse mask are cheaper one by one than whole rows."""
        assert isinstance(query_positions.layout, PackedLayout)
        short = q.shape[0] * q.shape[2] < SHORT * len(query_positions.layout.documents)
        return q.shape[2] ** 2 >= WORTH_A_PLAN and not short and not has_roles_or_parts(query_positions)

    def _sparse(
        self,
        fused: SoftmaxPathChoice,
        q: Tensor,
        k: Tensor,
        query_positions: TokenPositions,
        key_positions: TokenPositions,
    ) -> SoftmaxPathChoice:
        """Only what the mask shows, where that is less work than all pairs."""
        pairs = q.shape[2] * k.shape[2]
        if pairs < WORTH_A_PLAN or not can_plan(query_positions, key_positions):
            return fused
        if self.training and self.dropout:
            return fused._replace(why=f"{fused.why}, because dropout acts on the weights")
        found: SparsePlan = make_sparse_plan(self.mask, query_positions, key_positions, q.shape[1])
        share = found.cost / (q.shape[1] * pairs)
        if share >= 1:
            return fused._replace(why=f"{fused.why}, which shows too much to leave blocks out")
        why = f"{self.mask!r} for {share:.0%} of the cost of all pairs, in {found.describe()}"
        return SoftmaxPathChoice("sparse", why, plan=found)

    def _call(
        self, q: Tensor, query_positions: TokenPositions, key_positions: TokenPositions, position: Position
    ) -> softmax_with_bias.SoftmaxCall:
        return softmax_with_bias.SoftmaxCall(
            self.mask, query_positions, key_positions, position, self._scale(q), self.dropout if self.training else 0.0
        )

    def _scale(self, q: Tensor) -> float:
        return 1 / math.sqrt(q.shape[-1]) if self.scale is None else self.scale

    def _fused(self, k: Tensor, query_positions: TokenPositions, key_positions: TokenPositions) -> SoftmaxPathChoice:
        """How torch's kernel would be told of the mask: by nothing, by its causal flag, or written out."""
        if isinstance(query_positions.layout, ContiguousLayout) and isinstance(key_positions.layout, ContiguousLayout):
            ahead = query_positions.layout.start - key_positions.layout.start
            if self._all:
                return ALL_VISIBLE
            if self._causal and ahead >= k.shape[2] - 1:
                return PAST_ONLY
            if self._causal and ahead == 0:
                return ALIGNED
        # the documents are gone through last, and only where a causal mask makes the answer matter
        if (
            self._causal
            and isinstance(query_positions.layout, PackedLayout)
            and query_positions.layout == key_positions.layout
            and query_positions.layout.right_padded
        ):
            return RIGHT_PADDED
        return SoftmaxPathChoice("sdpa", f"the mask {self.mask!r} written out for these places", needs_dense_mask=True)

    def _document(
        self, q: Float[Tensor, "1 h l e"], k: Float[Tensor, "1 g l e"], v: Float[Tensor, "1 g l f"]
    ) -> Float[Tensor, "1 h l f"]:
        """A document by itself."""
        length = q.shape[2]
        size = max(size for pairs, size in LENGTH_ROUNDING.items() if length**2 >= pairs)
        more = -length % size if self.mask.causal else 0
        q, k, v = (F.pad(x, (0, 0, 0, more)) if more else x for x in (q, k, v))
        place = materialize(ContiguousLayout(), length + more)
        y: Tensor = self.forward(q, k, v, place, place, NoPosition()).y
        return y[:, :, :length]

    def _documents(
        self, q: Tensor, query_positions: TokenPositions, key_positions: TokenPositions
    ) -> SoftmaxPathChoice | None:
        if not isinstance(query_positions.layout, PackedLayout) or query_positions.layout is not key_positions.layout:
            return None
        # rows of nothing but padding: no document whose gradient could be asked for
        if not query_positions.layout.documents:
            return None
        why = f"{len(query_positions.layout.documents)} documents in {q.shape[0]} packed rows, one call each"
        return SoftmaxPathChoice("documents", why, causal=self._causal)


def _written_out(
    mask: Mask, query_positions: TokenPositions, key_positions: TokenPositions, heads: int
) -> Bool[Tensor, "b h l s"]:
    """The mask for all pairs, remembered where that is little and can come again."""
    queries, keys = query_positions.position_ids.shape[1], key_positions.position_ids.shape[1]
    few = queries * keys <= WORTH_A_PLAN and query_positions.position_ids.device.type == "cpu"
    if (
        few
        and layout_is_complete(query_positions)
        and layout_is_complete(key_positions)
        and not torch.compiler.is_compiling()
    ):
        return _spelled_out(mask, heads, query_positions.layout, key_positions.layout, queries, keys)
    return mask.dense(query_positions, key_positions, heads)


@lru_cache(maxsize=64)
def _spelled_out(
    mask: Mask,
    heads: int,
    mine: ContiguousLayout | PrefixedLayout,
    other: ContiguousLayout | PrefixedLayout,
    queries: int,
    keys: int,
) -> Bool[Tensor, "1 h l s"]:
    return mask.dense(materialize(mine, queries), materialize(other, keys), heads)


def _pairs(layout: PackedLayout) -> int:
    return sum((end - begin) ** 2 for _, begin, end in layout.documents)
