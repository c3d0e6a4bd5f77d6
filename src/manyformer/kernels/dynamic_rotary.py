"""Rotary positions whose rates follow the length so far; exact with a cache, because it keeps keys as they are."""

from collections.abc import Iterator
from typing import NamedTuple, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from manyformer.core import (
    PADDING_SEGMENT,
    ContiguousLayout,
    LayerOutput,
    State,
    TokenPositions,
    WatchFn,
    no_watch,
    tree_map,
)
from manyformer.kernels.kernel import Kernel
from manyformer.position import DynamicNTKRotaryScaling, Position
from manyformer.position.rotary import RotaryPairing, check_widths, rotate, rotation_table

QUERIES = 16
"""So many queries beyond the original length are answered together, each with all keys turned for it."""


class QueryRange(NamedTuple):
    """Columns `first` to `last` of the queries; `shares_rotation` where one turn of the keys serves all of them."""

    first: int
    last: int
    shares_rotation: bool


@final
class DynamicRotaryKernel(Kernel):
    """`inner` over queries and keys that turn as in `RotaryPosition`, at rates that depend on how long the context is
    by then.

    A query at position i turns, and has all keys turned for it, at the rates for i + 1 tokens. So what it sees does not
    depend on later tokens, on how many were given at once, or on other rows of the batch: step by step is as in one
    pass. (The common implementation takes the length of the whole call, and leaves cached keys turned for the length
    of their time.) Keys arrive and are cached unturned. Queries within the original length share one turn, as in
    `RotaryPosition`; each later one costs a turn of all keys, in a full pass as in decoding. Needs a kernel that keeps
    keys."""

    def __init__(
        self,
        inner: Kernel,
        width: int,
        scaling: DynamicNTKRotaryScaling,
        *,
        rotated: int | None = None,
        pairs: RotaryPairing = "interleaved",
        base: float = 10_000.0,
    ) -> None:
        super().__init__()
        self.rotated = width if rotated is None else rotated
        check_widths(width, self.rotated, pairs)
        if inner.recurrent:
            raise ValueError(f"DynamicRotary turns old keys anew, but {type(inner).__name__} does not keep them")
        if inner.tied_qk:
            raise ValueError(
                f"DynamicRotary turns keys for each query, but {type(inner).__name__} takes queries for keys"
            )
        self.inner, self.width, self.scaling, self.pairs, self.base = inner, width, scaling, pairs, base
        # another position that turns keys would be applied before the cache, and be turned along
        self.supports = inner.supports - {"query", "key"}

    def init_state(self, batch: int, *, device: torch.device, dtype: torch.dtype) -> State:
        return self.inner.init_state(batch, device=device, dtype=dtype)

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
        outs: list[Tensor] = []
        total: Tensor | float = 0.0
        for part in self._parts(query_positions):
            some, there = q[:, :, part.first : part.last], _columns(query_positions, part)
            inputs = (
                self._together(some, k, v, there, key_positions)
                if part.shares_rotation
                else self._apart(some, k, v, there, key_positions)
            )
            y, state, loss = self.inner(*inputs, position, state, watch)
            outs.append(y if part.shares_rotation else _rejoined(y, q.shape[0]))
            total = total + loss
        return LayerOutput(outs[0] if len(outs) == 1 else torch.cat(outs, dim=2), state, total)

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
        apart = sum(part.last - part.first for part in self._parts(query_positions) if not part.shares_rotation)
        told = f"; the keys are turned for each of {apart} queries beyond {self.scaling.original}" if apart else ""
        return self.inner.explain(q, k, v, query_positions, key_positions, position, state, watch) + told

    def extra_repr(self) -> str:
        return f"{self.width}, {self.scaling}, rotated={self.rotated}, pairs={self.pairs}, base={self.base:g}"

    def _parts(self, query_positions: TokenPositions) -> Iterator[QueryRange]:
        """Columns within the original length in every row first, then a few at a time."""
        length = query_positions.position_ids.shape[1]
        late = (
            (query_positions.position_ids >= self.scaling.original) & (query_positions.segment_ids != PADDING_SEGMENT)
        ).any(0)
        begin = int(late.int().argmax()) if bool(late.any()) else length
        if begin or not length:
            yield QueryRange(0, begin, shares_rotation=True)
        for first in range(begin, length, QUERIES):
            yield QueryRange(first, min(first + QUERIES, length), shares_rotation=False)

    def _together(
        self, q: Tensor, k: Tensor, v: Tensor, query_positions: TokenPositions, key_positions: TokenPositions
    ) -> tuple[Tensor, Tensor, Tensor, TokenPositions, TokenPositions]:
        short = torch.zeros_like(query_positions.position_ids[:1, :1])
        return (
            self._turn(q, query_positions.position_ids, short),
            self._turn(k, key_positions.position_ids, short),
            v,
            query_positions,
            key_positions,
        )

    def _apart(
        self, q: Tensor, k: Tensor, v: Tensor, query_positions: TokenPositions, key_positions: TokenPositions
    ) -> tuple[Tensor, Tensor, Tensor, TokenPositions, TokenPositions]:
        """Every query as a row of its own, with keys turned for it."""
        rows, each = q.shape[0], q.shape[2]
        query_positions = tree_map(lambda t: t.expand(rows, -1).reshape(-1, 1), query_positions)
        key_positions = tree_map(
            lambda t: t.expand(rows, -1).repeat_interleave(each, dim=0), key_positions._replace(layout=None)
        )
        q = q.transpose(1, 2).flatten(0, 1)[:, :, None]
        k, v = (x.repeat_interleave(each, dim=0) for x in (k, v))
        return (
            self._turn(q, query_positions.position_ids, query_positions.position_ids + 1),
            self._turn(k, key_positions.position_ids, query_positions.position_ids + 1),
            v,
            query_positions._replace(layout=None),
            key_positions,
        )

    def _turn(self, x: Tensor, pos: Int[Tensor, "b l"], lengths: Int[Tensor, "#b 1"]) -> Tensor:
        pace = self.scaling.rates(self.rotated, self.base, lengths)
        idle = 0 if self.pairs == "halves" else (self.width - self.rotated) // 2
        table = rotation_table(pos[..., None] * pace, idle=idle).to(torch.promote_types(x.dtype, torch.float32))
        return rotate(x, table[:, None], self.pairs)


def _columns(positions: TokenPositions, part: QueryRange) -> TokenPositions:
    layout = (
        ContiguousLayout(positions.layout.start + part.first)
        if isinstance(positions.layout, ContiguousLayout)
        else None
    )
    if (part.first, part.last) == (0, positions.position_ids.shape[1]):
        return positions
    columns: TokenPositions = tree_map(lambda t: t[:, part.first : part.last], positions._replace(layout=None))
    return columns._replace(layout=layout)


def _rejoined(y: Float[Tensor, "bl h 1 f"], rows: int) -> Float[Tensor, "b h l f"]:
    """The answers to queries that were rows of their own, in their places."""
    return y[:, :, 0].reshape(rows, -1, y.shape[1], y.shape[-1]).transpose(1, 2)
