"""The calls of a part of a plan: some rows of blocks of one head, or one row of several heads, with their keys."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from manyformer.ops.plan_records import BlockTiles, MaskPart
from manyformer.ops.scratch_buffer import ScratchBuffer

SCORES_PER_STEP = 1 << 21
"""Scores per call of tiles: few enough to fit a cache, many enough to amortize the overhead of a call."""


class TileStep(NamedTuple):
    """Some rows of one head, or for several heads their rows with the same keys, concatenated.

    `rows` index those of the tiles; `heads` is an int in the first case. `first_query_block` is the first query block
    where rows are consecutive.
    """

    tiles: BlockTiles
    heads: int | slice
    rows: slice
    first_query_block: int | None
    bias: Float[Tensor, "#n c s"] | None
    rows_without_keys: Bool[Tensor, "#n c"] | None

    @property
    def shorter_rows(self) -> Iterator[tuple[slice, int]]:
        """The rows with fewer key blocks, and their number of key blocks."""
        across = isinstance(self.heads, slice)
        for row, num_blocks in self.tiles.shorter_rows:
            if self.rows.start <= row < self.rows.stop:
                begin = row - self.rows.start
                yield slice(None) if across else slice(begin, begin + 1), num_blocks

    def select_queries(self, x: Float[Tensor, "h n c *e"]) -> Float[Tensor, "r _c *e"]:
        """The query blocks, as a view where rows are consecutive."""
        if self.first_query_block is None:
            return x[self.heads].index_select(0, self._row_index(x))
        selected = x[self.heads, self.first_query_block : self.first_query_block + self.rows.stop - self.rows.start]
        if isinstance(self.heads, slice):
            return selected.flatten(1, 2)
        return selected

    def write_queries(self, new: Float[Tensor, "r _c *e"], out: Float[Tensor, "h n c *e"]) -> None:
        """Write `new` to the query blocks of `out`."""
        if self.first_query_block is None:
            out[self.heads].index_copy_(0, self._row_index(out), new)
        else:
            self.select_queries(out).copy_(new)

    def write_product(
        self, left: Float[Tensor, "r _c s"], right: Float[Tensor, "r s e"], out: Float[Tensor, "h n c e"]
    ) -> None:
        """Write the product of `left` and `right` to the query blocks of `out`."""
        if self.first_query_block is None:
            self.write_queries(torch.bmm(left, right), out)
        else:
            torch.bmm(left, right, out=self.select_queries(out))

    def add_product(
        self, left: Float[Tensor, "r _c s"], right: Float[Tensor, "r s e"], out: Float[Tensor, "h n c e"]
    ) -> None:
        """Add the product of `left` and `right` to the query blocks of `out`."""
        if self.first_query_block is None:
            out[self.heads].index_add_(0, self._row_index(out), torch.bmm(left, right))
        else:
            self.select_queries(out).baddbmm_(left, right)

    def select_keys(self, x: Float[Tensor, "h n c e"]) -> Float[Tensor, "r s e"]:
        """The key blocks of each row, concatenated; overlapping views where they are contiguous."""
        head_blocks = x[self.heads]
        num_keys = self.tiles.columns.shape[1] * x.shape[2]
        if self.tiles.step is None:
            gathered = head_blocks.index_select(1 if isinstance(self.heads, slice) else 0, self._column_index(x))
            return gathered.view(-1, num_keys, x.shape[-1])
        head, block, token, channel = x.stride()
        if isinstance(self.heads, slice):
            count = len(head_blocks)
            stride = head
        else:
            count = self.rows.stop - self.rows.start
            stride = self.tiles.step * block
        offset = head_blocks.storage_offset() + self._first_key_block * block
        return head_blocks.as_strided((count, num_keys, x.shape[-1]), (stride, token, channel), offset)

    def add_to_keys(
        self,
        left: Float[Tensor, "r _c s"],
        right: Float[Tensor, "r _c e"],
        out: Float[Tensor, "h n c e"],
        scratch: ScratchBuffer,
    ) -> None:
        """Add the product of `left`^T and `right`, by key, to the key blocks of `out`."""
        step = self.tiles.step
        num_columns = self.tiles.columns.shape[1]
        head_blocks = out[self.heads]
        if step is None:
            new = torch.bmm(left.mT, right, out=scratch("to_keys", len(left), left.shape[-1], right.shape[-1]))
            parts = new.view(len(new), num_columns, -1, new.shape[-1])
            if isinstance(self.heads, slice):
                head_blocks.index_add_(1, self._column_index(out), parts)
            else:
                head_blocks.flatten(1).index_add_(0, self._column_index(out), parts.view(len(new) * num_columns, -1))
        elif isinstance(self.heads, slice):
            key_blocks = head_blocks[:, self._first_key_block : self._first_key_block + num_columns]
            key_blocks.flatten(1, 2).baddbmm_(left.mT, right)
        elif step == 0:
            key_blocks = head_blocks[self._first_key_block : self._first_key_block + num_columns]
            key_blocks.flatten(0, 1).addmm_(left.flatten(0, 1).mT, right.flatten(0, 1))
        else:
            # added in place: first the first blocks of all rows, then the second ones
            for number, part in enumerate(left.chunk(num_columns, -1), self._first_key_block):
                head_blocks[number : number + len(left)].baddbmm_(part.mT, right)

    @property
    def _first_key_block(self) -> int:
        """The first key block, where key blocks are contiguous."""
        return int(self.tiles.columns[self.rows.start, 0])

    def _row_index(self, x: Tensor) -> Int[Tensor, " r"]:
        return self.tiles.rows[self.rows].to(x.device)

    def _column_index(self, x: Tensor) -> Int[Tensor, " k"]:
        """Key block indices, row by row; a single row's where all have the same."""
        rows = self.tiles.columns[self.rows]
        return (rows[:1] if isinstance(self.heads, slice) else rows).flatten().to(x.device)


def make_steps(part: MaskPart, heads: int, like: Tensor) -> Iterator[TileStep]:
    """Yield all calls of a part, always in the same order; their additive masks have the dtype of `like`."""
    for tiles in part.tiles:
        count = len(tiles.rows)
        max_rows = max(SCORES_PER_STEP // (part.q.size * tiles.columns.shape[1] * part.k.size), 1)
        across = tiles.same_keys or count < max(heads, 2)
        size = max_rows if tiles.same_keys or not across else 1
        for begin in range(0, count, size):
            rows = slice(begin, min(begin + size, count))
            bias, rows_without_keys = _mask_bias(tiles, rows, like)
            first_query_block = None
            if across or tiles.rows_adjacent:
                first_query_block = int(tiles.rows[begin])
            heads_per_step = max(max_rows // (rows.stop - begin), 1)
            starts = range(0, heads, heads_per_step)
            slices = (slice(head, min(head + heads_per_step, heads)) for head in starts) if across else range(heads)
            for head_slice in slices:
                yield TileStep(tiles, head_slice, rows, first_query_block, bias, rows_without_keys)


def _mask_bias(tiles: BlockTiles, rows: slice, like: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Additive mask of these rows (a single one if all are equal), and the queries without keys.

    Hidden pairs get a finite number, so that the weights of a query without keys are wrong but not nan.
    """
    if tiles.inner is None:
        return None, None
    inner = tiles.inner
    rows_without_keys = tiles.rows_without_keys
    inner = inner if len(inner) == 1 else inner[rows]
    if rows_without_keys is not None and len(rows_without_keys) > 1:
        rows_without_keys = rows_without_keys[rows]
    bias = torch.zeros(inner.shape, dtype=like.dtype, device=like.device)
    bias.masked_fill_(~inner.to(like.device), torch.finfo(like.dtype).min)
    return bias, None if rows_without_keys is None else rows_without_keys.to(like.device)
