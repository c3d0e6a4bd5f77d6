"""Rotary positions whose rates follow the length so far; exact with a cache, because it keeps keys as they are."""

from collections.abc import Iterator
from typing import NamedTuple, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from manyformer.core import PADDING, Out, Place, Plain, State, Watch, ignore, tree_map
from manyformer.kernels.base import Kernel
from manyformer.position import DynamicNTK, Position
from manyformer.position.rotary import Pairs, angles, check_widths, turn

QUERIES = 16
"""So many queries beyond the original length are answered together, each with all keys turned for it."""


class Part(NamedTuple):
    """Columns `first` to `last` of the queries; `together` where one turn of the keys serves all of them."""

    first: int
    last: int
    together: bool


@final
class DynamicRotary(Kernel):
    """`inner` over queries and keys that turn as in `Rotary`, at rates that depend on how long the context is by then.

    A query at position i turns, and has all keys turned for it, at the rates for i + 1 tokens. So what it sees does not
    depend on later tokens, on how many were given at once, or on other rows of the batch: step by step is as in one
    pass. (The common implementation takes the length of the whole call, and leaves cached keys turned for the length
    of their time.) Keys arrive and are cached unturned. Queries within the original length share one turn, as in
    `Rotary`; each later one costs a turn of all keys, in a full pass as in decoding. Needs a kernel that keeps keys.
    """

    def __init__(
        self,
        inner: Kernel,
        width: int,
        scaling: DynamicNTK,
        *,
        rotated: int | None = None,
        pairs: Pairs = "interleaved",
        base: float = 10_000.0,
    ) -> None:
        super().__init__()
        self.rotated = width if rotated is None else rotated
        check_widths(width, self.rotated, pairs)
        if inner.folds:
            raise ValueError(f"DynamicRotary turns old keys anew, but {type(inner).__name__} does not keep them")
        if inner.shares:
            raise ValueError(
                f"DynamicRotary turns keys for each query, but {type(inner).__name__} takes queries for keys"
            )
        self.inner, self.width, self.scaling, self.pairs, self.base = inner, width, scaling, pairs, base
        # another position that turns keys would be applied before the cache, and be turned along
        self.honours = inner.honours - {"query", "key"}

    def start(self, batch: int, *, device: torch.device, dtype: torch.dtype) -> State:
        return self.inner.start(batch, device=device, dtype=dtype)

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
        outs: list[Tensor] = []
        total: Tensor | float = 0.0
        for part in self._parts(at):
            some, there = q[:, :, part.first : part.last], _columns(at, part)
            inputs = self._together(some, k, v, there, of) if part.together else self._apart(some, k, v, there, of)
            y, state, loss = self.inner(*inputs, position, state, watch)
            outs.append(y if part.together else _rejoined(y, q.shape[0]))
            total = total + loss
        return Out(outs[0] if len(outs) == 1 else torch.cat(outs, dim=2), state, total)

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
        apart = sum(part.last - part.first for part in self._parts(at) if not part.together)
        told = f"; the keys are turned for each of {apart} queries beyond {self.scaling.original}" if apart else ""
        return self.inner.explain(q, k, v, at, of, position, state, watch) + told

    def extra_repr(self) -> str:
        return f"{self.width}, {self.scaling}, rotated={self.rotated}, pairs={self.pairs}, base={self.base:g}"

    def _parts(self, at: Place) -> Iterator[Part]:
        """Columns within the original length in every row first, then a few at a time."""
        length = at.pos.shape[1]
        late = ((at.pos >= self.scaling.original) & (at.seg != PADDING)).any(0)
        begin = int(late.int().argmax()) if bool(late.any()) else length
        if begin or not length:
            yield Part(0, begin, together=True)
        for first in range(begin, length, QUERIES):
            yield Part(first, min(first + QUERIES, length), together=False)

    def _together(
        self, q: Tensor, k: Tensor, v: Tensor, at: Place, of: Place
    ) -> tuple[Tensor, Tensor, Tensor, Place, Place]:
        short = torch.zeros_like(at.pos[:1, :1])
        return self._turn(q, at.pos, short), self._turn(k, of.pos, short), v, at, of

    def _apart(
        self, q: Tensor, k: Tensor, v: Tensor, at: Place, of: Place
    ) -> tuple[Tensor, Tensor, Tensor, Place, Place]:
        """Every query as a row of its own, with keys turned for it."""
        rows, each = q.shape[0], q.shape[2]
        at = tree_map(lambda t: t.expand(rows, -1).reshape(-1, 1), at)
        of = tree_map(lambda t: t.expand(rows, -1).repeat_interleave(each, dim=0), of._replace(layout=None))
        q = q.transpose(1, 2).flatten(0, 1)[:, :, None]
        k, v = (x.repeat_interleave(each, dim=0) for x in (k, v))
        return self._turn(q, at.pos, at.pos + 1), self._turn(k, of.pos, at.pos + 1), v, at._replace(layout=None), of

    def _turn(self, x: Tensor, pos: Int[Tensor, "b l"], lengths: Int[Tensor, "#b 1"]) -> Tensor:
        pace = self.scaling.rates(self.rotated, self.base, lengths)
        idle = 0 if self.pairs == "halves" else (self.width - self.rotated) // 2
        table = angles(pos[..., None] * pace, idle=idle).to(torch.promote_types(x.dtype, torch.float32))
        return turn(x, table[:, None], self.pairs)


def _columns(place: Place, part: Part) -> Place:
    layout = Plain(place.layout.start + part.first) if isinstance(place.layout, Plain) else None
    if (part.first, part.last) == (0, place.pos.shape[1]):
        return place
    columns: Place = tree_map(lambda t: t[:, part.first : part.last], place._replace(layout=None))
    return columns._replace(layout=layout)


def _rejoined(y: Float[Tensor, "bl h 1 f"], rows: int) -> Float[Tensor, "b h l f"]:
    """The answers to queries that were rows of their own, in their places."""
    return y[:, :, 0].reshape(rows, -1, y.shape[1], y.shape[-1]).transpose(1, 2)
