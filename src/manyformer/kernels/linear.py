"""Linear attention: features of queries and keys in place of exp(q.k), so that keys can be summed beforehand."""

from typing import Literal, NamedTuple, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from manyformer.core import PADDING, Out, Packed, Place, Plain, State, Watch, ignore, tree_map
from manyformer.kernels import summary
from manyformer.kernels.base import Kernel
from manyformer.kernels.features import FeatureMap, Features
from manyformer.kernels.rules import Delta, Form, Memory, Rule, Sum, Tokens
from manyformer.kernels.summary import Summary
from manyformer.masks import Causal, Everything, Mask
from manyformer.ops.runs import FRESH, runs
from manyformer.position import Position
from manyformer.precision import full_precision

Way = Literal["summed"] | Form


class Stream(NamedTuple):
    """The memory of the document that each row is in, and that document's number; empty before any token."""

    memory: Memory = Memory()
    seg: Int[Tensor, " b"] | None = None

    @property
    def empty(self) -> bool:
        """Whether no token has been."""
        return self.memory.matrix is None


class Attended(NamedTuple):
    """Outputs, what is kept, and the weights where every pair was written out."""

    y: Float[Tensor, "b h l f"]
    state: Stream | Summary
    weights: Float[Tensor, "b h l s"] | None = None


class Choice(NamedTuple):
    """A way of computing and the reason for it."""

    way: Way
    why: str


@final
class Linear(Kernel):
    """Attention by sums of features (Katharopoulos et al. 2020), causal or to the whole document.

    `features` says what stands for exp(q.k); there is no further scale. With `Causal()` tokens come in order: pairs
    are formed in chunks of `chunk`, and a memory of constant size, in float32 at least, carries all that is earlier;
    `rule` says how it takes a token in. Decoding needs that memory alone. With `Everything()` keys are summed once,
    in cross-attention also for all tokens to come. No other mask can be had: what is summed cannot be told apart.
    Weights whose sum is nearer to 0 than `floor` count as `floor`. `path` forces a way: "quadratic" (all pairs, the
    definition, which a watcher of weights also gets), "chunked" or "recurrent" (token by token) for `Causal()`,
    "summed" for `Everything()`. Raises ValueError for what it cannot do.
    """

    honours = frozenset({"query", "key"})
    folds = True

    def __init__(
        self,
        features: FeatureMap,
        mask: Mask | None = None,
        *,
        rule: Rule | None = None,
        chunk: int = 64,
        floor: float = 1e-6,
        path: Literal["auto"] | Way = "auto",
    ) -> None:
        super().__init__()
        self.mask = Everything() if mask is None else mask
        self.features, self.rule = features, Sum() if rule is None else rule
        self.chunk, self.floor, self.path = chunk, floor, path
        self.gates, self._causal = self.rule.gates, self.mask == Causal()
        if not self._causal and self.mask != Everything():
            raise ValueError(f"Linear sums over keys and cannot leave some out: mask {mask!r} must be Causal() or None")
        if not self._causal and not isinstance(self.rule, Sum):
            raise ValueError(f"{type(self.rule).__name__} takes in one token after the other: it needs mask Causal()")
        if features.signed and isinstance(self.rule, Delta):
            raise ValueError(f"Delta divides features by their sum, which those of {type(features).__name__} have not")
        if chunk < 1:
            raise ValueError(f"Linear: chunk ({chunk}) must be at least 1 token")
        self._ways: frozenset[Way] = self.rule.forms if self._causal else frozenset({"quadratic", "summed"})
        if path != "auto" and path not in self._ways:
            raise ValueError(f"Linear: path '{path}' must be auto or one of {', '.join(sorted(self._ways))} here")

    def start(self, batch: int, *, device: torch.device, dtype: torch.dtype) -> State:
        return Stream() if self._causal else Summary()

    def forward(
        self,
        q: Float[Tensor, "b h l e"],
        k: Float[Tensor, "b g s e"],
        v: Float[Tensor, "b g s f"],
        at: Place,
        of: Place,
        position: Position,
        state: State = None,
        watch: Watch = ignore,
    ) -> Out:
        way, wide = self._choose(q, k, state, watch).way, torch.promote_types(v.dtype, torch.float32)
        attend = self._streamed if self._causal else self._summed
        with full_precision(q.device):
            a, keys = self.features(q.to(wide), at).y, self.features(k.to(wide), of)
            y, after, weights = attend(a, keys, v.to(wide), at, of, state, way)
        if weights is not None:
            watch(self, "weights", weights)
        return Out(y.to(v.dtype), None if state is None else after)

    def explain(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        at: Place,
        of: Place,
        position: Position,
        state: State = None,
        watch: Watch = ignore,
    ) -> str:
        choice = self._choose(q, k, state, watch)
        return f"{choice.way}: {choice.why}"

    def extra_repr(self) -> str:
        return f"{self.mask!r}, chunk={self.chunk}, path={self.path}"

    def _choose(self, q: Tensor, k: Tensor, state: State, watch: Watch) -> Choice:
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
            return Choice(self.path, "forced")
        if watch is not ignore and whole and "quadratic" in self._ways:
            return Choice("quadratic", "the weights are watched, and only the written-out form has them")
        if not self._causal:
            return Choice("summed", "every key is visible, so all are summed once")
        if q.shape[2] == 1:
            return Choice("recurrent", "a single token")
        return Choice("chunked", f"causal, {self.chunk} tokens at a time")

    def _streamed(
        self, a: Tensor, keys: Features, v: Tensor, at: Place, of: Place, state: Stream | None, way: Way
    ) -> Attended:
        """Tokens go on with the memory of the document that their row is in."""
        assert way != "summed"
        shared = a.shape[1] // v.shape[1]
        before = Stream() if state is None else state
        c, log = keys if shared == 1 else tree_map(lambda x: x.repeat_interleave(shared, 1), keys)
        v = v if shared == 1 else v.repeat_interleave(shared, 1)
        v, gate = (v[..., :-1], v[..., -1]) if self.gates else (v, None)
        number, real, last = _tracks(of, before.seg, keep=state is not None)
        tokens = Tokens(a, c, v, log, gate, real, number)
        memory = before.memory if shared == 1 else tree_map(lambda x: x.repeat_interleave(shared, 1), before.memory)
        y, memory, weights = self.rule(tokens, memory, form=way, chunk=self.chunk, floor=self.floor)
        return Attended(y, Stream(tree_map(lambda x: x[:, ::shared], memory), last), weights)

    def _summed(
        self, a: Tensor, keys: Features, v: Tensor, at: Place, of: Place, state: Summary | None, way: Way
    ) -> Attended:
        """To all keys of the own document, those that the state has taken in before too."""
        kept = summary.summarise(*keys, v, of, Summary() if state is None else state)
        if way == "quadratic":
            y, weights = summary.quadratic(a, *keys, v, at, of, self.floor)
            return Attended(y, kept, weights)
        return Attended(summary.read(a, at, kept, v.shape[-1], self.floor), kept)


class _Tracks(NamedTuple):
    """Runs (see `manyformer.ops.runs`) and real tokens where they matter, and the number of the last document."""

    number: Int[Tensor, "b l"] | None
    real: Bool[Tensor, "b l"] | None
    last: Int[Tensor, " b"] | None


def _tracks(place: Place, before: Tensor | None, *, keep: bool) -> _Tracks:
    """`before` is the number of the document that each row was in, None where no token has been."""
    if isinstance(place.layout, Plain):
        return _Tracks(None, None, place.seg[:, -1].clone() if keep else None)
    if not keep and isinstance(place.layout, Packed) and _one_each(place.layout):
        # padding on the right comes after all tokens that count
        return _Tracks(None, None if place.layout.right_padded else place.seg != PADDING, None)
    number, real, last = runs(place.seg, place.seg.new_full(place.seg.shape[:1], FRESH) if before is None else before)
    return _Tracks(number, real, last.clone())


def _one_each(layout: Packed) -> bool:
    rows = [row for row, _, _ in layout.documents]
    return len(set(rows)) == len(rows)
