"""Documents of packed rows in rows of their own, so that positional algorithms give equal results padded or packed.

A run is a maximal range of tokens of one segment within a row of a stream. `make_grid` gives each document a row,
`document_rows` queries and keys from each document's first token on, also after cached keys, and `segment_rows` cuts
the rows into segments that count from each document's first token.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from manyformer.nn.core import PADDING_SEGMENT, ContiguousLayout, PackedLayout, TokenPositions
from manyformer.nn.ops.any_length import scan_any_length
from manyformer.nn.runtime.device_reads import count_values
from manyformer.nn.runtime.torch_internals import is_of_any_size, narrowed

NO_SEGMENT = -2
"""The segment id that stands for a stream without any token so far."""


class SegmentRuns(NamedTuple):
    """The run of each token, 0 for the one that continues the previous call's; the mask of tokens; the last segment."""

    run_ids: Int[Tensor, "b l"]
    valid: Bool[Tensor, "b l"]
    last_segment: Int[Tensor, " b"]


def segment_runs(segment_ids: Int[Tensor, "b l"], last_segment: Int[Tensor, " b"]) -> SegmentRuns:
    """Number the runs; `last_segment` is the segment of the stream's last token, and padding does not end a run.

    A segment that occurs in several pieces is a new run each time; its positions restart as well.
    """
    valid = segment_ids != PADDING_SEGMENT
    column = torch.arange(segment_ids.shape[1], device=segment_ids.device)
    # the column of the last token up to each one
    last = torch.where(valid, column, -1).cummax(1).values
    latest_segment = torch.where(last < 0, last_segment[:, None], segment_ids.gather(1, last.clamp(min=0)))
    previous = torch.cat([last_segment[:, None], latest_segment[:, :-1]], dim=1)
    return SegmentRuns((valid & (segment_ids != previous)).cumsum(1), valid, latest_segment[:, -1])


def running_max(
    x: Float[Tensor, "b h l"], run: Int[Tensor, "b l"] | None, initial: Float[Tensor, "b h"]
) -> Float[Tensor, "b h l"]:
    """Cumulative maximum within each run; run 0 (everything where `run` is None) continues from `initial`."""
    if run is None:
        return x.cummax(-1).values.maximum(initial[..., None])
    x = torch.where(run[:, None] == 0, x.maximum(initial[..., None]), x)
    # doubling: the maximum over the last 1, 2, 4, ... tokens
    shift = 1
    while shift < x.shape[-1]:
        same = (run[:, shift:] == run[:, :-shift])[:, None]
        maxima = torch.where(same, x[..., shift:].maximum(x[..., :-shift]), x[..., shift:])
        x = torch.cat([x[..., :shift], maxima], dim=-1)
        shift *= 2
    return x


def decayed_running_max(
    x: Float[Tensor, "b h l"], decay: Float[Tensor, "b h l"], run: Int[Tensor, "b l"] | None, initial: Tensor
) -> Float[Tensor, "b h l"]:
    """m_t = max(m_(t-1) + decay_t, x_t); run 0 begins with `initial` (b, h), every later one with 0."""
    if run is not None:
        is_first = (run != torch.nn.functional.pad(run[:, :-1], (1, 0)))[:, None]
        # what is before the first token of a run reaches none of its tokens
        x = torch.where(is_first, x.maximum(decay), x)
        decay = decay.masked_fill(is_first, -torch.inf)
    if is_of_any_size(x.shape[-1]):
        # what is before the first token counts as a token
        levels = torch.cat([initial[..., None], x], -1)
        decays = torch.cat([torch.zeros_like(initial[..., None]), decay], -1)
        return scan_any_length(_later_level, (levels, decays), (-torch.inf, 0.0), -1)[0][..., 1:]
    x = torch.cat([x[..., :1].maximum(initial[..., None] + decay[..., :1]), x[..., 1:]], dim=-1)
    # doubling: the maximum over the last 1, 2, 4, ... tokens, and the sum of their decays
    shift = 1
    while shift < x.shape[-1]:
        reached = torch.cat([x[..., :shift], x[..., shift:].maximum(x[..., :-shift] + decay[..., shift:])], dim=-1)
        decay = torch.cat([decay[..., :shift], decay[..., shift:] + decay[..., :-shift]], dim=-1)
        x = reached
        shift = 2 * shift
    return x


def _later_level(earlier: tuple[Tensor, ...], later: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The maximum and the decay of two parts of a text: what the later one leaves of the earlier one's is compared."""
    return later[0].maximum(earlier[0] + later[1]), earlier[1] + later[1]


class DocumentGrid(NamedTuple):
    """One grid row per document, with tokens in the columns of their positions.

    `slots` is the flat slot of each token, one past the end for padding; `present` counts the tokens in each slot.
    """

    slots: Int[Tensor, "b s"]
    present: Int[Tensor, "n p"]

    def scatter(self, x: Float[Tensor, "b g s e"]) -> Float[Tensor, "n g p e"]:
        """Scatter the last tokens of each row to the grid; empty slots get zeros."""
        slots = self.slots[:, self.slots.shape[1] - x.shape[2] :].flatten()
        flat = x.transpose(1, 2).reshape(-1, x.shape[1] * x.shape[3])
        # added, not written: tokens of equal position share a slot
        padded = flat.new_zeros(self.present.numel() + 1, flat.shape[1]).index_add(0, slots, flat)
        return padded[:-1].view(*self.present.shape, x.shape[1], x.shape[3]).transpose(1, 2)

    def gather(self, y: Float[Tensor, "n h p f"], count: int) -> Float[Tensor, "b h l f"]:
        """Gather the slots of the last `count` tokens of each row; zeros for padding."""
        slots = self.slots[:, self.slots.shape[1] - count :]
        flat = y.transpose(1, 2).reshape(-1, y.shape[1] * y.shape[3])
        flat = torch.cat([flat, flat.new_zeros(1, flat.shape[1])])
        return flat[slots].view(*slots.shape, y.shape[1], y.shape[3]).transpose(1, 2)


def make_grid(
    line: Int[Tensor, "b s"],
    column: Int[Tensor, "b s"],
    valid: Bool[Tensor, "b s"],
    num_lines: int,
    columns: int | None = None,
) -> DocumentGrid:
    """The grid with tokens at grid row `line` and `column`; tokens that are not `valid` are left out.

    `columns` is their number where a layout says it; a device is read for it otherwise."""
    if columns is None:
        columns = int(torch.where(valid, column, 0).max()) + 1
    # padding goes to one extra slot, which is dropped
    slots = torch.where(valid, line * columns + column, num_lines * columns)
    present = count_values(slots, num_lines * columns + 1)[:-1].view(num_lines, columns)
    return DocumentGrid(slots, present)


def grid_by_run(key_positions: TokenPositions) -> DocumentGrid:
    """The grid with one row per run of one segment id, without padding; every batch row gets equally many."""
    segment_ids = key_positions.segment_ids
    layout = key_positions.layout
    batch = segment_ids.shape[0]
    number, valid, _ = segment_runs(segment_ids, segment_ids.new_full((batch,), NO_SEGMENT))
    if isinstance(layout, PackedLayout):
        max_runs = max(layout.most_in_row, 1)
        columns = max(layout.longest, 1)
    else:
        max_runs = max(int(number.max()), 1)
        columns = None
    line = torch.arange(batch, device=segment_ids.device)[:, None] * max_runs + (number - 1).clamp(min=0)
    return make_grid(line, key_positions.position_ids, valid, batch * max_runs, columns)


class DocumentRows(NamedTuple):
    """One row per document: a key is in the column of its position, a query at `positions` in its document.

    Without grids the rows of a call are the documents. `length` counts the queries of a row of the call. `is_whole`
    says that queries and keys are the same tokens."""

    key_grid: DocumentGrid | None
    query_grid: DocumentGrid | None
    positions: Int[Tensor, "#n l"]
    length: int
    is_whole: bool

    @property
    def is_contiguous(self) -> bool:
        """Whether the rows of the call are the documents."""
        return self.key_grid is None

    def keys(self, x: Float[Tensor, "b g s e"]) -> Float[Tensor, "n g p e"]:
        """What belongs to keys, in the rows of documents."""
        if self.key_grid is None:
            return x
        return self.key_grid.scatter(x)

    def queries(self, x: Float[Tensor, "b h l e"]) -> Float[Tensor, "n h m e"]:
        """What belongs to queries, in the rows of documents."""
        if self.query_grid is None:
            return x
        return self.query_grid.scatter(x)

    def gather(self, y: Float[Tensor, "n h m f"]) -> Float[Tensor, "b h l f"]:
        """The inverse of `queries`; zeros for padding."""
        if self.query_grid is None:
            return y
        return self.query_grid.gather(y, self.length)


def document_rows(query_positions: TokenPositions, key_positions: TokenPositions, length: int) -> DocumentRows:
    """The rows of documents whose last `length` tokens in each row of the call are queries."""
    query_layout = query_positions.layout
    key_layout = key_positions.layout
    device = query_positions.position_ids.device
    if isinstance(query_layout, ContiguousLayout) and key_layout == ContiguousLayout():
        start = query_layout.start
        return DocumentRows(
            None, None, torch.arange(start, start + length, device=device)[None], length, is_whole=start == 0
        )
    keys = grid_by_run(key_positions)
    rows, columns = keys.present.shape
    if isinstance(key_layout, PackedLayout) and query_layout is key_layout:
        return DocumentRows(keys, keys, torch.arange(columns, device=device)[None], length, is_whole=True)
    slots = keys.slots[:, keys.slots.shape[1] - length :]
    valid = slots < rows * columns
    row = (slots // columns).clamp(max=rows - 1)
    position = slots % columns
    # queries of a document are contiguous: its first one says where they begin
    first = torch.full((rows,), columns, device=device).scatter_reduce(0, row[valid], position[valid], "amin")
    queries = make_grid(row, position - first[row], valid, rows)
    positions = first[:, None] + torch.arange(queries.present.shape[1], device=device)
    return DocumentRows(keys, queries, positions, length, is_whole=False)


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
        if not is_of_any_size(used) and used <= segment:
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
            return narrowed(y, 2, self.offset, length)
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
        return SegmentRows(
            None, offset, first, count, rows, torch.full_like(rows, int(start > 0)).bool(), rows, columns
        )
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
    # where each document begins is the smallest of its positions, in whatever order tokens come
    begin = position_ids.new_full((documents + 1,), torch.iinfo(torch.long).max)
    begin = begin.scatter_reduce(0, document, position_ids.flatten(), "amin")[:-1]
    # runs that a row does not have are documents without tokens
    count = count_values(document, documents + 1)[:-1]
    begin = begin.where(count > 0, 0)
    first = begin % segment
    grid = make_grid(line, position_ids - (begin - first)[line], valid, documents, longest)
    columns = -(-grid.present.shape[1] // segment) * segment
    # only the first document of a row can continue that of the call before
    is_first_run = torch.arange(documents, device=number.device) % max_runs == 0
    latest = torch.where(number[:, -1] > 0, rows * max_runs + number[:, -1] - 1, -1)
    row = rows.repeat_interleave(max_runs)
    return SegmentRows(grid, 0, first, count, row, (begin > 0) & is_first_run, latest, columns)
