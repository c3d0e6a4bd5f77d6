"""The calls of a part of a plan: some rows of blocks of one head, or one row of some heads, and what they see."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from manyformer.ops.plan import Part, Tiles
from manyformer.ops.scratch import Scratch

CACHED = 1 << 21
"""Scores that are held at once: few enough to stay in a cache, many enough that starting calls costs little."""


class Step(NamedTuple):
    """Some rows of one head, or one row of some heads: the other of `head` and `rows` is a number.

    Rows are counted among those of the tiles. `first` are the first block of queries and the first of keys where both
    are neighbours.
    """

    tiles: Tiles
    head: int | slice
    rows: int | slice
    first: tuple[int, int]
    bias: Float[Tensor, "#n c s"] | None
    blind: Bool[Tensor, "#n c"] | None

    def queries(self, x: Float[Tensor, "h n _c *e"]) -> Float[Tensor, "r c *e"]:
        """The blocks of queries, a view where they are neighbours; one long block where all see the same."""
        if isinstance(self.rows, int):
            return x[self.head, self.first[0]]
        if self.tiles.step is not None:
            found = x[self.head, self.first[0] : self.first[0] + self.rows.stop - self.rows.start]
            return found.view(1, -1, *found.shape[2:]) if self.tiles.alike else found
        return x[self.head].index_select(0, self.tiles.rows[self.rows].to(x.device))

    def put(self, new: Float[Tensor, "r _c *e"], into: Float[Tensor, "h n c *e"]) -> None:
        """Write what the queries get."""
        if self._neighbours:
            self.queries(into).copy_(new)
        else:
            into[self.head].index_copy_(0, self.tiles.rows[self.rows].to(into.device), new)

    def put_product(
        self, one: Float[Tensor, "r _c s"], other: Float[Tensor, "r s e"], into: Float[Tensor, "h n c e"]
    ) -> None:
        """Write `one` `other` to the queries."""
        if self._neighbours:
            torch.bmm(one, other, out=self.queries(into))
        else:
            self.put(torch.bmm(one, other), into)

    def add_product(
        self, one: Float[Tensor, "r _c s"], other: Float[Tensor, "r s e"], into: Float[Tensor, "h n c e"]
    ) -> None:
        """Add `one` `other` to what the queries have."""
        if self._neighbours:
            self.queries(into).baddbmm_(one, other)
        else:
            into[self.head].index_add_(0, self.tiles.rows[self.rows].to(into.device), torch.bmm(one, other))

    def keys(self, x: Float[Tensor, "h n c e"]) -> Float[Tensor, "r s e"]:
        """What each row sees, its blocks laid end to end; overlapping views where they are neighbours."""
        one = x[self.head]
        if self.tiles.step is None:
            columns = self.tiles.columns[self.rows]
            found = one.index_select(0 if isinstance(self.rows, slice) else 1, columns.flatten().to(x.device))
            return found.view(-1, columns.shape[-1] * x.shape[2], x.shape[-1])
        head, block, token, channel = x.stride()
        if isinstance(self.rows, slice):
            count, stride = 1 if self.tiles.alike else self.rows.stop - self.rows.start, self.tiles.step * block
        else:
            count, stride = one.shape[0], head
        shape = (count, self.tiles.columns.shape[1] * x.shape[2], x.shape[-1])
        return one.as_strided(shape, (stride, token, channel), one.storage_offset() + self.first[1] * block)

    def add_to_keys(
        self,
        one: Float[Tensor, "r _c s"],
        other: Float[Tensor, "r _c e"],
        into: Float[Tensor, "h n c e"],
        scratch: Scratch,
    ) -> None:
        """Add `one`^T `other`, what the keys that each row saw get, to the blocks that they came from."""
        step, most, begin, mine = self.tiles.step, self.tiles.columns.shape[1], self.first[1], into[self.head]
        if step is None:
            new = torch.bmm(one.mT, other, out=scratch("to_keys", len(one), one.shape[-1], other.shape[-1]))
            parts = new.view(len(new), most, -1, new.shape[-1])
            columns = self.tiles.columns[self.rows].to(into.device)
            if isinstance(self.rows, int):
                mine.index_add_(1, columns, parts)
            else:
                mine.flatten(1).index_add_(0, columns.flatten(), parts.view(columns.numel(), -1))
        elif isinstance(self.rows, int):
            mine[:, begin : begin + most].flatten(1, 2).baddbmm_(one.mT, other)
        elif step == 0:
            mine[begin : begin + most].flatten(0, 1).addmm_(one.flatten(0, 1).mT, other.flatten(0, 1))
        else:
            # straight to where it belongs, all first blocks of the rows, then all second ones
            for number, part in enumerate(one.chunk(most, -1), begin):
                mine[number : number + len(one)].baddbmm_(part.mT, other)

    @property
    def _neighbours(self) -> bool:
        return self.tiles.step is not None or isinstance(self.rows, int)


def steps(part: Part, heads: int, like: Tensor) -> Iterator[Step]:
    """All calls of a part, always in the same order; what they add to scores is made `like` the queries."""
    for tiles in part.tiles:
        most = max(CACHED // (part.q.size * tiles.columns.shape[1] * part.k.size), 1)
        if len(tiles.rows) < heads and not tiles.alike:
            for row in range(len(tiles.rows)):
                bias, blind = _hidden(tiles, slice(row, row + 1), like)
                first = int(tiles.rows[row]), int(tiles.columns[row, 0])
                for begin in range(0, heads, most):
                    yield Step(tiles, slice(begin, min(begin + most, heads)), row, first, bias, blind)
            continue
        for begin in range(0, len(tiles.rows), most):
            some = slice(begin, min(begin + most, len(tiles.rows)))
            bias, blind = _hidden(tiles, some, like)
            first = int(tiles.rows[begin]), int(tiles.columns[begin, 0])
            for head in range(heads):
                yield Step(tiles, head, some, first, bias, blind)


def _hidden(tiles: Tiles, rows: slice, like: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """What is added to the scores of these rows, one for all where they are alike, and who sees nothing.

    A finite number for what is hidden: where nothing else is there, weights are then wrong but no nan.
    """
    if tiles.inner is None:
        return None, None
    inner, blind = (x if x is None or len(x) == 1 else x[rows] for x in (tiles.inner, tiles.blind))
    assert inner is not None
    bias = torch.zeros(inner.shape, dtype=like.dtype, device=like.device)
    bias.masked_fill_(~inner.to(like.device), torch.finfo(like.dtype).min)
    return bias, None if blind is None else blind.to(like.device)
