"""Attention whose heads learn how far to look back."""

import math
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from manyformer.core import PADDING, Lined, Out, Packed, Place, Plain, State, Watch, ignore
from manyformer.kernels.base import Kernel
from manyformer.kernels.spans import Spans
from manyformer.masks import Window
from manyformer.ops import spanned as ops
from manyformer.ops.spanned import Heads, Rows
from manyformer.position import Position

FEW_QUERIES = 16
"""So few queries are written out: a block of a band would be larger."""


@final
class Spanned(Kernel):
    """Softmax attention to the keys before each query, within the span of each head (Sukhbaatar et al. 2019).

    Section 2: weights are m e^s / sum m e^s with m = clip((ramp + z - x) / ramp, 0, 1) for the key x tokens back, the
    token itself not among them; the authors' code counts x from 0. Keys beyond the ramp of every head are never
    computed, and heads with shorter spans compute less. The loss is `cost` times the mean span of the heads, and of the
    tokens where each has its own. The first token of a document sees no key and gets zeros. Watched, it reports as
    "spans" the lengths, (#b, h, #l). The position may add vectors to keys by distance.
    """

    honours = frozenset({"query", "key", "score"})
    # how much is computed depends on the spans
    by_content = True

    def __init__(self, spans: Spans, *, cost: float = 0.0, scale: float | None = None) -> None:
        super().__init__()
        if cost < 0:
            raise ValueError(f"Spanned: cost ({cost}) must be at least 0")
        self.spans, self.cost, self.scale = spans, cost, scale
        self.asks = spans.asks
        # all keys before, but not the token itself
        self.sight = self.mask = Window(spans.longest + 1) & ~Window(1)

    def forward(
        self,
        q: Float[Tensor, "b h l n"],
        k: Float[Tensor, "b g s e"],
        v: Float[Tensor, "b g s f"],
        at: Place,
        of: Place,
        position: Position,
        state: State = None,
        watch: Watch = ignore,
    ) -> Out:
        q, asked = torch.split(q, [q.shape[-1] - self.asks, self.asks], -1)
        lengths = self.spans(asked)
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        watch(self, "spans", lengths)
        loss = self.cost * self._mean(lengths, at) if self.cost else 0.0
        scale = 1 / math.sqrt(q.shape[-1]) if self.scale is None else self.scale
        heads = Heads(lengths, self.spans.ramp, scale)
        if (rows := self._rows(q, at, of, position, watch)) is None:
            y, weights = ops.naive(q, k, v, heads, self.mask.dense(at, of, q.shape[1]), position=position, at=at, of=of)
            watch(self, "weights", weights)
            return Out(y, state, loss)
        reach = self.spans.reach(lengths)
        return Out(ops.attend(q, k, v, heads, self._vectors(position, max(reach)), reach, rows), state, loss)

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
        if self._rows(q, at, of, position, watch) is None:
            return "naive: all keys that are kept, for few queries or where tokens do not stand side by side"
        reach = self.spans.reach(self.spans(q[..., q.shape[-1] - self.asks :]))
        return f"banded: no more keys than the heads see, {', '.join(map(str, reach))}"

    def _rows(self, q: Tensor, at: Place, of: Place, position: Position, watch: Watch) -> Rows | None:
        """How queries lie against keys, where both stand side by side and are worth a band."""
        if watch is not ignore or q.shape[2] <= FEW_QUERIES:
            return None
        found = position.by_distance(1, 0)
        if "score" in position.touches() and (found is None or found.keys is None or found.bias is not None):
            return None
        one, two = at.layout, of.layout
        if isinstance(one, Plain) and isinstance(two, Plain):
            return Rows(one.start - two.start)
        if isinstance(one, Lined) and isinstance(two, Lined):
            return Rows(one.start - two.start, at.seg, of.seg)
        packed = isinstance(one, Packed) and one == two
        return Rows(0, at.seg, of.seg) if packed else None

    def _vectors(self, position: Position, far: int) -> Float[Tensor, "#h r e"] | None:
        """What the position adds to keys `far`, ..., 1 before their query."""
        if "score" not in position.touches():
            return None
        found = position.by_distance(far, 0)
        assert found is not None
        assert found.keys is not None
        assert found.turn is None
        return found.keys[:, :-1]

    def _mean(self, lengths: Float[Tensor, "#b h #l"], at: Place) -> Tensor:
        if not self.asks:
            return lengths.mean()
        real = (at.seg != PADDING).expand(lengths.shape[0], -1)[:, None]
        return torch.where(real, lengths, 0.0).sum() / (real.sum() * lengths.shape[1]).clamp(min=1)
