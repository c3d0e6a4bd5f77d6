"""Softmax of scaled dot products, on the fastest path that is exact for the call at hand."""

import math
from functools import lru_cache
from typing import Literal, NamedTuple, final, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from manyformer.core import Fronted, Out, Packed, Place, Plain, State, Watch, ignore
from manyformer.kernels import scored
from manyformer.kernels.base import Kernel
from manyformer.kernels.scored import SHORT
from manyformer.kernels.scored import Plan as Scored
from manyformer.masks import Causal, Everything, Mask
from manyformer.ops import flex_mask, sparse
from manyformer.ops import softmax as ops
from manyformer.ops.plan import Plan, plan
from manyformer.ops.spelled import marked, spell, spelled, told
from manyformer.position import NoPosition, Position

Path = Literal["naive", "sdpa", "documents", "sparse", "blocked", "flex"]

PAIRS_PER_CALL = 20_000
"""Starting one more attention call on a CPU costs about as much as this many (head, query, key) pairs."""


WORTH_A_PLAN = 1 << 17
"""Fewer (query, key) pairs than this are never worth looking for those that a mask leaves out."""


ROUND = {1: 32, WORTH_A_PLAN: 128}
"""Documents of so many (query, key) pairs or more are taken for a multiple of so many tokens under a causal mask.

No token sees what is added, and documents of nearly one length share a mask or a plan.
"""


class Choice(NamedTuple):
    """A path and the reason for it; `causal`, `dense` and `plan` say how its mask is respected."""

    path: Path
    why: str
    causal: bool = False
    dense: bool = False
    plan: Plan | None = None
    scored: Scored | None = None


EVERY_KEY = Choice("sdpa", "every key is visible")
PAST = Choice("sdpa", "every key lies in the past")
ALIGNED = Choice("sdpa", "causal from the first token on, torch's own flag", causal=True)
RIGHT_PADDED = Choice("sdpa", "causal with padding on the right, which no token sees", causal=True)


@final
class Softmax(Kernel):
    """Scaled dot-product attention (Vaswani et al. 2017, section 3.2.1) under a mask.

    The scale is 1 / sqrt(e) unless given. A token that may see no key gets zeros; what padding gets means nothing.
    `dropout` acts on the weights; it makes torch leave its fast CPU kernel, so it is 0 unless asked for. `path` forces
    one way of computing: "naive" (any mask, any position, the definition), "sdpa" (torch's fused kernel), "documents"
    (packed rows on a CPU, one call each), "sparse" (only the blocks that the mask shows, no dropout of weights),
    "blocked" (any mask and position, a block of queries at a time, so that memory is linear in length) or "flex"
    (masks, and positions that add to scores by distance, in one compiled kernel; chosen on CUDA alone, as it has no
    gradient on a CPU). A forced path that cannot serve a call raises ValueError.
    """

    honours = frozenset({"query", "key", "score", "value"})

    def __init__(
        self,
        mask: Mask | None = None,
        *,
        dropout: float = 0.0,
        scale: float | None = None,
        path: Literal["auto"] | Path = "auto",
    ) -> None:
        super().__init__()
        if path != "auto" and path not in get_args(Path):
            raise ValueError(f"Softmax: path '{path}' does not exist; known: auto, {', '.join(get_args(Path))}")
        self.mask = self.sight = Everything() if mask is None else mask
        self.dropout, self.scale, self.path = dropout, scale, path
        self._all, self._causal = self.mask == Everything(), self.mask == Causal()

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
        choice = self._choose(q, k, at, of, position, watch)
        scale = self._scale(q)
        dropout = self.dropout if self.training else 0.0
        if choice.path == "naive":
            mask = self.mask.dense(at, of, q.shape[1])
            y, weights = ops.naive(q, k, v, mask, scale=scale, dropout=dropout, position=position, at=at, of=of)
            watch(self, "weights", weights)
            return Out(y, state)
        if choice.path == "documents":
            assert isinstance(at.layout, Packed)
            if not (self._all or self._causal):
                return Out(ops.each_document(q, k, v, at.layout, self._document), state)
            return Out(ops.per_document(q, k, v, at.layout, causal=choice.causal, scale=scale, dropout=dropout), state)
        if choice.scored is not None:
            return Out(scored.run(choice.scored, self._call(q, at, of, position), q, k, v), state)
        if choice.plan is not None:
            return Out(sparse.attend(q, k, v, choice.plan, scale=scale), state)
        if choice.path == "flex":
            return Out(flex_mask.attend(q, k, v, self.mask, at, of, scale=scale), state)
        dense = _written_out(self.mask, at, of, q.shape[1]) if choice.dense else None
        return Out(ops.fused(q, k, v, dense, causal=choice.causal, scale=scale, dropout=dropout), state)

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
        choice = self._choose(q, k, at, of, position, watch)
        return f"{choice.path}: {choice.why}"

    def extra_repr(self) -> str:
        return f"{self.mask!r}, path={self.path}"

    def _choose(self, q: Tensor, k: Tensor, at: Place, of: Place, position: Position, watch: Watch) -> Choice:
        if self.path == "naive":
            return Choice("naive", "forced")
        if watch is not ignore:
            needs = "the weights are watched, and only the written-out form has them"
            if self.path != "auto":
                raise ValueError(f"Softmax: path '{self.path}' cannot serve this call: {needs}")
            return Choice("naive", needs)
        if self.path == "blocked" or position.touches() & {"score", "value"}:
            found = scored.choose(self._call(q, at, of, position), q, k, self.path)
            return Choice(found.path, found.why, scored=found if found.path != "naive" else None)
        if self.path == "documents":
            packed = self._documents(q, at, of)
            if packed is None or not (self._all or self._causal):
                raise ValueError(
                    "Softmax: path 'documents' needs packed self-attention with the mask Causal() or Everything()"
                )
            return packed._replace(why="forced")
        dropped = self.training and self.dropout > 0
        if self.path in ("sparse", "flex"):
            if dropped:
                raise ValueError(f"Softmax: path '{self.path}' never forms the weights that dropout is to act on")
            blocks = plan(self.mask, at, of, q.shape[1]) if self.path == "sparse" else None
            return Choice(self.path, "forced", plan=blocks)
        fused = self._fused(k, at, of)
        # what is computed without numbers tells the costs of a CPU
        if self.path == "auto" and fused.dense and q.device.type in ("cpu", "meta"):
            return self._cheaper(fused, q, k, at, of)
        if self.path == "auto" and fused.dense and q.device.type == "cuda" and not dropped:
            return Choice("flex", f"{self.mask!r} compiled, for the blocks that it shows")
        return fused

    def _cheaper(self, fused: Choice, q: Tensor, k: Tensor, at: Place, of: Place) -> Choice:
        """One call for each document, or only for visible blocks, where that saves more than starting calls costs."""
        packed = self._documents(q, at, of)
        if not (self._all or self._causal):
            return packed if packed and self._apart(q, at) else self._sparse(fused, q, k, at, of)
        if packed is None:
            return fused
        assert isinstance(at.layout, Packed)
        saved = q.shape[1] * (q.shape[0] * q.shape[2] * k.shape[2] - _pairs(at.layout))
        return packed if saved > PAIRS_PER_CALL * len(at.layout.documents) else fused

    def _apart(self, q: Tensor, at: Place) -> bool:
        """Whether documents under a sparse mask are cheaper one by one than whole rows."""
        assert isinstance(at.layout, Packed)
        short = q.shape[0] * q.shape[2] < SHORT * len(at.layout.documents)
        return q.shape[2] ** 2 >= WORTH_A_PLAN and not short and not marked(at)

    def _sparse(self, fused: Choice, q: Tensor, k: Tensor, at: Place, of: Place) -> Choice:
        """Only what the mask shows, where that is less work than all pairs."""
        pairs = q.shape[2] * k.shape[2]
        if pairs < WORTH_A_PLAN or not told(at, of):
            return fused
        if self.training and self.dropout:
            return fused._replace(why=f"{fused.why}, because dropout acts on the weights")
        found: Plan = plan(self.mask, at, of, q.shape[1])
        share = found.cost / (q.shape[1] * pairs)
        if share >= 1:
            return fused._replace(why=f"{fused.why}, which shows too much to leave blocks out")
        why = f"{self.mask!r} for {share:.0%} of the cost of all pairs, in {found.describe()}"
        return Choice("sparse", why, plan=found)

    def _call(self, q: Tensor, at: Place, of: Place, position: Position) -> scored.Call:
        return scored.Call(self.mask, at, of, position, self._scale(q), self.dropout if self.training else 0.0)

    def _scale(self, q: Tensor) -> float:
        return 1 / math.sqrt(q.shape[-1]) if self.scale is None else self.scale

    def _fused(self, k: Tensor, at: Place, of: Place) -> Choice:
        """How torch's kernel would be told of the mask: by nothing, by its causal flag, or written out."""
        if isinstance(at.layout, Plain) and isinstance(of.layout, Plain):
            ahead = at.layout.start - of.layout.start
            if self._all:
                return EVERY_KEY
            if self._causal and ahead >= k.shape[2] - 1:
                return PAST
            if self._causal and ahead == 0:
                return ALIGNED
        # the documents are gone through last, and only where a causal mask makes the answer matter
        if self._causal and isinstance(at.layout, Packed) and at.layout == of.layout and at.layout.right_padded:
            return RIGHT_PADDED
        return Choice("sdpa", f"the mask {self.mask!r} written out for these places", dense=True)

    def _document(
        self, q: Float[Tensor, "1 h l e"], k: Float[Tensor, "1 g l e"], v: Float[Tensor, "1 g l f"]
    ) -> Float[Tensor, "1 h l f"]:
        """A document by itself."""
        length = q.shape[2]
        size = max(size for pairs, size in ROUND.items() if length**2 >= pairs)
        more = -length % size if self.mask.causal else 0
        q, k, v = (F.pad(x, (0, 0, 0, more)) if more else x for x in (q, k, v))
        place = spell(Plain(), length + more)
        y: Tensor = self.forward(q, k, v, place, place, NoPosition()).y
        return y[:, :, :length]

    def _documents(self, q: Tensor, at: Place, of: Place) -> Choice | None:
        if not isinstance(at.layout, Packed) or at.layout is not of.layout:
            return None
        # rows of nothing but padding: no document whose gradient could be asked for
        if not at.layout.documents:
            return None
        why = f"{len(at.layout.documents)} documents in {q.shape[0]} packed rows, one call each"
        return Choice("documents", why, causal=self._causal)


def _written_out(mask: Mask, at: Place, of: Place, heads: int) -> Bool[Tensor, "b h l s"]:
    """The mask for all pairs, remembered where that is little and can come again."""
    queries, keys = at.pos.shape[1], of.pos.shape[1]
    few = queries * keys <= WORTH_A_PLAN and at.pos.device.type == "cpu"
    if few and spelled(at) and spelled(of) and not torch.compiler.is_compiling():
        return _spelled_out(mask, heads, at.layout, of.layout, queries, keys)
    return mask.dense(at, of, heads)


@lru_cache(maxsize=64)
def _spelled_out(
    mask: Mask, heads: int, mine: Plain | Fronted, other: Plain | Fronted, queries: int, keys: int
) -> Bool[Tensor, "1 h l s"]:
    return mask.dense(spell(mine, queries), spell(other, keys), heads)


def _pairs(layout: Packed) -> int:
    return sum((end - begin) ** 2 for _, begin, end in layout.documents)
