"""The calls of a part of a plan: some rows of blocks of one head, or one row of some heads, and what they see."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from manyformer.ops.scratch_buffer import ScratchBuffer
from manyformer.ops.sparse_plan import BlockTiles, MaskPart

CACHED = 1 << 21
"""Scores that are held at once: few enough to stay in a cache, many enough that starting calls costs little."""


class TileStep(NamedTuple):
    """Some rows of one head, or of some heads rows that see the same keys, as one long row of each.

    Rows are counted among those of the tiles; `heads` is a number in the first case. `first` is their first block of
    queries where they are neighbours.
    """

    tiles: BlockTiles
    heads: int | slice
    rows: slice
    first: int | None
    bias: Float[Tensor, "#n c s"] | None
    blind: Bool[Tensor, "#n c"] | None

    @property
    def short(self) -> Iterator[tuple[slice, int]]:
        """The rows that see fewer blocks, and how many."""
        across = isinstance(self.heads, slice)
        for row, seen in self.tiles.shorter_rows:
            if self.rows.start <= row < self.rows.stop:
                begin = row - self.rows.start
                yield slice(None) if across else slice(begin, begin + 1), seen

    def queries(self, x: Float[Tensor, "h n c *e"]) -> Float[Tensor, "r _c *e"]:
        """The blocks of queries, a view where they are neighbours."""
        if self.first is None:
            return x[self.heads].index_select(0, self._rows(x))
        found = x[self.heads, self.first : self.first + self.rows.stop - self.rows.start]
        return found.flatten(1, 2) if isinstance(self.heads, slice) else found

    def put(self, new: Float[Tensor, "r _c *e"], into: Float[Tensor, "h n c *e"]) -> None:
        """Write what the queries get."""
        if self.first is None:
            into[self.heads].index_copy_(0, self._rows(into), new)
        else:
            self.queries(into).copy_(new)

    def put_product(
        self, one: Float[Tensor, "r _c s"], other: Float[Tensor, "r s e"], into: Float[Tensor, "h n c e"]
    ) -> None:
        """Write `one` `other` to the queries."""
        if self.first is None:
            self.put(torch.bmm(one, other), into)
        else:
            torch.bmm(one, other, out=self.queries(into))

    def add_product(
        self, one: Float[Tensor, "r _c s"], other: Float[Tensor, "r s e"], into: Float[Tensor, "h n c e"]
    ) -> None:
        """Add `one` `other` to what the queries have."""
        if self.first is None:
            into[self.heads].index_add_(0, self._rows(into), torch.bmm(one, other))
        else:
            self.queries(into).baddbmm_(one, other)

    def keys(self, x: Float[Tensor, "h n c e"]) -> Float[Tensor, "r s e"]:
        """What each row sees, its blocks laid end to end; overlapping views where they are neighbours."""
        one, wide = x[self.heads], self.tiles.columns.shape[1] * x.shape[2]
        if self.tiles.step is None:
            found = one.index_select(1 if isinstance(self.heads, slice) else 0, self._columns(x))
            return found.view(-1, wide, x.shape[-1])
        head, block, token, channel = x.stride()
        if isinstance(self.heads, slice):
            count, stride = len(one), head
        else:
            count, stride = self.rows.stop - self.rows.start, self.tiles.step * block
        return one.as_strided(
            (count, wide, x.shape[-1]), (stride, token, channel), one.storage_offset() + self._seen * block
        )

    def add_to_keys(
        self,
        one: Float[Tensor, "r _c s"],
        other: Float[Tensor, "r _c e"],
        into: Float[Tensor, "h n c e"],
        scratch: ScratchBuffer,
    ) -> None:
        """Add `one`^T `other`, what the keys that each row saw get, to the blocks that they came from."""
        step, most, mine = self.tiles.step, self.tiles.columns.shape[1], into[self.heads]
        if step is None:
            new = torch.bmm(one.mT, other, out=scratch("to_keys", len(one), one.shape[-1], other.shape[-1]))
            parts = new.view(len(new), most, -1, new.shape[-1])
            if isinstance(self.heads, slice):
                mine.index_add_(1, self._columns(into), parts)
            else:
                mine.flatten(1).index_add_(0, self._columns(into), parts.view(len(new) * most, -1))
        elif isinstance(self.heads, slice):
            mine[:, self._seen : self._seen + most].flatten(1, 2).baddbmm_(one.mT, other)
        elif step == 0:
            mine[self._seen : self._seen + most].flatten(0, 1).addmm_(one.flatten(0, 1).mT, other.flatten(0, 1))
        else:
            # straight to where it belongs, all first blocks of the rows, then all second ones
            for number, part in enumerate(one.chunk(most, -1), self._seen):
                mine[number : number + len(one)].baddbmm_(part.mT, other)

    @property
    def _seen(self) -> int:
        """The first block of keys, where they are neighbours."""
        return int(self.tiles.columns[self.rows.start, 0])

    def _rows(self, x: Tensor) -> Int[Tensor, " r"]:
        return self.tiles.rows[self.rows].to(x.device)

    def _columns(self, x: Tensor) -> Int[Tensor, " k"]:
        """The blocks that are seen, row by row; once where all rows see the same."""
        rows = self.tiles.columns[self.rows]
        return (rows[:1] if isinstance(self.heads, slice) else rows).flatten().to(x.device)


def steps(part: MaskPart, heads: int, like: Tensor) -> Iterator[TileStep]:
    """All calls of a part, always in the same order; what they add to scores is made `like` the queries."""
    for tiles in part.tiles:
        count, most = len(tiles.rows), max(CACHED // (part.q.size * tiles.columns.shape[1] * part.k.size), 1)
        across = tiles.same_keys or count < max(heads, 2)
        size = most if tiles.same_keys or not across else 1
        for begin in range(0, count, size):
            rows = slice(begin, min(begin + size, count))
            bias, blind = _hidden(tiles, rows, like)
            first = int(tiles.rows[begin]) if across or tiles.rows_adjacent else None
            many = max(most // (rows.stop - begin), 1)
            each = (slice(head, min(head + many, heads)) for head in range(0, heads, many)) if across else range(heads)
            for some in each:
                yield TileStep(tiles, some, rows, first, bias, blind)


def _hidden(tiles: BlockTiles, rows: slice, like: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """What is added to the scores of these rows, one for all where they are alike, and who sees nothing.

    A finite number for what is hidden: where nothing else is there, weights are then wrong but no nan.
    """
    if tiles.inner is None:
        return None, None
    inner, blind = (x if x is None or len(x) == 1 else x[rows] for x in (tiles.inner, tiles.rows_without_keys))
    assert inner is not None
    bias = torch.zeros(inner.shape, dtype=like.dtype, device=like.device)
    bias.masked_fill_(~inner.to(like.device), torch.finfo(like.dtype).min)
    return bias, None if blind is None else blind.to(like.device)
