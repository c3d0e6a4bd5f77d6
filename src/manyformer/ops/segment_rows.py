"""Tokens of documents in rows of their own, cut into segments that count from each document's first token."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from manyformer.core import ContiguousLayout, PackedLayout, TokenPositions
from manyformer.device_reads import count_values
from manyformer.ops.document_grid import DocumentGrid, make_grid
from manyformer.ops.segment_runs import NO_SEGMENT, segment_runs


class SegmentRows(NamedTuple):
    """One row per document of a call; its columns begin where the segment of its first token does.

    A document has its tokens of this call in the `token_count` columns from `first` on; it may continue what the row
    `row` of the call held before. `latest` is the last document of each row of the call, -1 for none. Without `grid`
    the rows of the call are the documents, and begin in the column `offset`."""

    grid: DocumentGrid | None
    offset: int
    first: Int[Tensor, " n"]
    token_count: Int[Tensor, " n"]
    row: Int[Tensor, " n"]
    continues: Bool[Tensor, " n"]
    latest: Int[Tensor, " b"]
    columns: int

    @property
    def present(self) -> Bool[Tensor, "n p"]:
        """Whether a column has a token, of this call or of earlier ones."""
        column = torch.arange(self.columns, device=self.first.device)
        is_earlier = column < self.first[:, None]
        return (column < (self.first + self.token_count)[:, None]) & (~is_earlier | self.continues[:, None])

    def shortened(self, length: int, segment: int) -> "SegmentRows":
        """The rows of a call of `length` tokens, where a single segment ends with the last token of the longest."""
        if self.grid is None:
            used = self.offset + length
        else:
            used = self.grid.present.shape[1]
        if used <= segment:
            return self._replace(columns=used)
        return self

    def scatter(self, x: Float[Tensor, "b g l e"]) -> Float[Tensor, "n g p e"]:
        """The tokens in the rows of documents, zeros elsewhere."""
        if self.grid is None:
            y = F.pad(x, (0, 0, self.offset, 0))
        else:
            y = self.grid.scatter(x)
        return F.pad(y, (0, 0, 0, self.columns - y.shape[2]))

    def gather(self, y: Float[Tensor, "n h p f"], length: int) -> Float[Tensor, "b h l f"]:
        """The inverse of `scatter` for calls of `length` tokens; zeros for padding."""
        if self.grid is None:
            return y[:, :, self.offset : self.offset + length]
        return self.grid.gather(y[:, :, : self.grid.present.shape[1]], length)


def segment_rows(positions: TokenPositions, batch: int, length: int, segment: int) -> SegmentRows:
    """The rows of `batch` rows of `length` tokens, with a whole number of segments of `segment` tokens each."""
    if isinstance(positions.layout, ContiguousLayout):
        start = positions.layout.start
        device = positions.segment_ids.device
        rows = torch.arange(batch, device=device)
        offset = start % segment
        first = torch.full_like(rows, offset)
        count = torch.full_like(rows, length)
        columns = -(-(offset + length) // segment) * segment
        return SegmentRows(None, offset, first, count, rows, torch.full_like(rows, start > 0).bool(), rows, columns)
    position_ids, segment_ids = (ids.expand(batch, -1) for ids in positions[:2])
    number, valid, _ = segment_runs(segment_ids, segment_ids.new_full((batch,), NO_SEGMENT))
    layout = positions.layout
    # documents of a known layout begin here, each at position 0
    max_runs = max(layout.most_in_row if isinstance(layout, PackedLayout) else int(number.max()), 1)
    longest = None
    if isinstance(layout, PackedLayout):
        longest = max(layout.longest, 1)
    rows = torch.arange(batch, device=number.device)
    line = rows[:, None] * max_runs + (number - 1).clamp(min=0)
    documents = batch * max_runs
    # padding goes to one extra document, which is dropped
    document = torch.where(valid, line, documents).flatten()
    begin = position_ids.new_full((documents + 1,), torch.iinfo(torch.long).max)
    begin = begin.scatter_reduce(0, document, position_ids.flatten(), "amin")[:-1]
    count = count_values(document, documents + 1)[:-1]
    begin = begin.where(count > 0, 0)
    first = begin % segment
    grid = make_grid(line, position_ids - (begin - first)[line], valid, documents, longest)
    columns = -(-grid.present.shape[1] // segment) * segment
    is_first_run = torch.arange(documents, device=number.device) % max_runs == 0
    latest = torch.where(number[:, -1] > 0, rows * max_runs + number[:, -1] - 1, -1)
    row = rows.repeat_interleave(max_runs)
    return SegmentRows(grid, 0, first, count, row, (begin > 0) & is_first_run, latest, columns)
