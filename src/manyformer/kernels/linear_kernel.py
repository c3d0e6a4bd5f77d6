"""Linear attention: features of queries and keys in place of exp(q.k), so that keys can be summed beforehand."""

from typing import Literal, NamedTuple, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from manyformer.autocast import autocast_disabled
from manyformer.core import (
    PADDING_SEGMENT,
    ContiguousLayout,
    LayerOutput,
    PackedLayout,
    State,
    TokenPositions,
    WatchFn,
    no_watch,
    tree_map,
)
from manyformer.kernels import document_sums
from manyformer.kernels.document_sums import DocumentSums
from manyformer.kernels.features import FeatureMap, FeatureValues
from manyformer.kernels.kernel import Kernel
from manyformer.kernels.memory_rules import (
    DeltaRule,
    MemoryRule,
    RecurrenceForm,
    RecurrentMemory,
    SumRule,
    TokenFeatures,
)
from manyformer.masks import AllKeys, Causal, Mask
from manyformer.ops.segment_runs import FRESH, segment_runs
from manyformer.position import Position

LinearPath = Literal["summed"] | RecurrenceForm


class LinearState(NamedTuple):
    """The memory of the document that each row is in, and that document's number; empty before any token."""

    memory: RecurrentMemory = RecurrentMemory()
    seg: Int[Tensor, " b"] | None = None

    @property
    def empty(self) -> bool:
        """Whether no token has been."""
        return self.memory.matrix is None


class LinearResult(NamedTuple):
    """Outputs, what is kept, and the weights where every pair was written out."""

    y: Float[Tensor, "b h l f"]
    state: LinearState | DocumentSums
    weights: Float[Tensor, "b h l s"] | None = None


class LinearPathChoice(NamedTuple):
    """A way of computing and the reason for it."""

    way: LinearPath
    why: str


@final
class LinearKernel(Kernel):
    """Attention by sums of features (Katharopoulos et al. 2020), causal or to the whole document.

    `features` says what stands for exp(q.k); there is no further scale. With `Causal()` tokens come in order: pairs
    are formed in chunks of `chunk`, and a memory of constant size, in float32 at least, carries all that is earlier;
    `rule` says how it takes a token in. Decoding needs that memory alone. With `AllKeys()` keys are summed once,
    in cross-attention also for all tokens to come. No other mask can be had: what is summed cannot be told apart.
    Weights whose sum is nearer to 0 than `floor` count as `floor`. `path` forces a way: "quadratic" (all pairs, the
    definition, which a watcher of weights also gets), "chunked" or "recurrent" (token by token) for `Causal()`,
    "summed" for `AllKeys()`. Raises ValueError for what it cannot do.
    """

    supports = frozenset({"query", "key"})
    recurrent = True

    def __init__(
        self,
        features: FeatureMap,
        mask: Mask | None = None,
        *,
        rule: MemoryRule | None = None,
        chunk: int = 64,
        floor: float = 1e-6,
        path: Literal["auto"] | LinearPath = "auto",
    ) -> None:
        super().__init__()
        self.mask = AllKeys() if mask is None else mask
        self.features, self.rule = features, SumRule() if rule is None else rule
        self.chunk, self.floor, self.path = chunk, floor, path
        self.gate_dim, self._causal = self.rule.gates, self.mask == Causal()
        if not self._causal and self.mask != AllKeys():
            raise ValueError(f"Linear sums over keys and cannot leave some out: mask {mask!r} must be Causal() or None")
        if not self._causal and not isinstance(self.rule, SumRule):
            raise ValueError(f"{type(self.rule).__name__} takes in one token after the other: it needs mask Causal()")
        if features.signed and isinstance(self.rule, DeltaRule):
            raise ValueError(f"Delta divides features by their sum, which those of {type(features).__name__} have not")
        if chunk < 1:
            raise ValueError(f"Linear: chunk ({chunk}) must be at least 1 token")
        self._ways: frozenset[LinearPath] = self.rule.forms if self._causal else frozenset({"quadratic", "summed"})
        if path != "auto" and path not in self._ways:
            raise ValueError(f"Linear: path '{path}' must be auto or one of {', '.join(sorted(self._ways))} here")

    def init_state(self, batch: int, *, device: torch.device, dtype: torch.dtype) -> State:
        return LinearState() if self._causal else DocumentSums()

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
        way, wide = self._choose(q, k, state, watch).way, torch.promote_types(v.dtype, torch.float32)
        attend = self._streamed if self._causal else self._summed
        with autocast_disabled(q.device):
            a, keys = self.features(q.to(wide), query_positions).y, self.features(k.to(wide), key_positions)
            y, after, weights = attend(a, keys, v.to(wide), query_positions, key_positions, state, way)
        if weights is not None:
            watch(self, "weights", weights)
        return LayerOutput(y.to(v.dtype), None if state is None else after)

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
        choice = self._choose(q, k, state, watch)
        return f"{choice.way}: {choice.why}"

    def extra_repr(self) -> str:
        return f"{self.mask!r}, chunk={self.chunk}, path={self.path}"

    def _choose(self, q: Tensor, k: Tensor, state: State, watch: WatchFn) -> LinearPathChoice:
        if self._causal and q.shape[2] != k.shape[2]:
            raise ValueError(
                f"Linear with Causal() takes in one key with each token, not {k.shape[2]} with {q.shape[2]}: "
                "for the keys of another sequence it must be built without Causal()"
            )
        # what a state has summed cannot be written out
        whole = state is None or state.empty
        if self.path == "quadratic" and not whole:
            raise ValueError("Linear: path 'quadratic' needs all keys, and a state keeps none of them")
        if self.path != "auto":
            return LinearPathChoice(self.path, "forced")
        if watch is not no_watch and whole and "quadratic" in self._ways:
            return LinearPathChoice("quadratic", "the weights are watched, and only the written-out form has them")
        if not self._causal:
            return LinearPathChoice("summed", "every key is visible, so all are summed once")
        if q.shape[2] == 1:
            return LinearPathChoice("recurrent", "a single token")
        return LinearPathChoice("chunked", f"causal, {self.chunk} tokens at a time")

    def _streamed(
        self,
        a: Tensor,
        keys: FeatureValues,
        v: Tensor,
        query_positions: TokenPositions,
        key_positions: TokenPositions,
        state: LinearState | None,
        way: LinearPath,
    ) -> LinearResult:
        """Tokens go on with the memory of the document that their row is in."""
        assert way != "summed"
        shared = a.shape[1] // v.shape[1]
        before = LinearState() if state is None else state
        c, log = keys if shared == 1 else tree_map(lambda x: x.repeat_interleave(shared, 1), keys)
        v = v if shared == 1 else v.repeat_interleave(shared, 1)
        v, gate = (v[..., :-1], v[..., -1]) if self.gate_dim else (v, None)
        number, real, last = _tracks(key_positions, before.seg, keep=state is not None)
        tokens = TokenFeatures(a, c, v, log, gate, real, number)
        memory = before.memory if shared == 1 else tree_map(lambda x: x.repeat_interleave(shared, 1), before.memory)
        y, memory, weights = self.rule(tokens, memory, form=way, chunk=self.chunk, floor=self.floor)
        return LinearResult(y, LinearState(tree_map(lambda x: x[:, ::shared], memory), last), weights)

    def _summed(
        self,
        a: Tensor,
        keys: FeatureValues,
        v: Tensor,
        query_positions: TokenPositions,
        key_positions: TokenPositions,
        state: DocumentSums | None,
        way: LinearPath,
    ) -> LinearResult:
        """To all keys of the own document, those that the state has taken in before too."""
        kept = document_sums.sum_keys(*keys, v, key_positions, DocumentSums() if state is None else state)
        if way == "quadratic":
            y, weights = document_sums.document_sums_reference(a, *keys, v, query_positions, key_positions, self.floor)
            return LinearResult(y, kept, weights)
        return LinearResult(document_sums.read_sums(a, query_positions, kept, v.shape[-1], self.floor), kept)


class _Tracks(NamedTuple):
    """Runs (see `manyformer.ops.segment_runs`) and real tokens where they matter, and the number of the last document."""

    number: Int[Tensor, "b l"] | None
    real: Bool[Tensor, "b l"] | None
    last: Int[Tensor, " b"] | None


def _tracks(positions: TokenPositions, before: Tensor | None, *, keep: bool) -> _Tracks:
    """`before` is the number of the document that each row was in, None where no token has been."""
    if isinstance(positions.layout, ContiguousLayout):
        return _Tracks(None, None, positions.segment_ids[:, -1].clone() if keep else None)
    if not keep and isinstance(positions.layout, PackedLayout) and _one_each(positions.layout):
        # padding on the right comes after all tokens that count
        return _Tracks(None, None if positions.layout.right_padded else positions.segment_ids != PADDING_SEGMENT, None)
    number, real, last = segment_runs(
        positions.segment_ids,
        positions.segment_ids.new_full(positions.segment_ids.shape[:1], FRESH) if before is None else before,
    )
    return _Tracks(number, real, last.clone())


def _one_each(layout: PackedLayout) -> bool:
    rows = [row for row, _, _ in layout.documents]
    return len(set(rows)) == len(rows)
