"""Layouts of text as rows of equal length: windows of the joined documents, in order or at random, or packed ones.

Rows are gathered from one flat array of tokens without a Python loop over them: the helpers are at the end."""

from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from manyformer.base.context_windows import ContextWindows
from manyformer.base.type_aliases import IntArray
from manyformer.data.storage.token_shards import TokenShard
from manyformer.nn.batches import IGNORE_INDEX
from manyformer.nn.core import PADDING_SEGMENT


class TextRows(NamedTuple):
    """Rows of tokens; `targets` are the next tokens, or IGNORE_INDEX if another row has the target or there is none.

    `is_first_copy` is False at tokens that an earlier row contains too.
    """

    tokens: IntArray
    targets: IntArray
    segments: IntArray | None
    is_first_copy: NDArray[np.bool_]


class RowArrangement(ABC):
    """The numbered rows of an epoch, which together contain every target exactly once unless they begin at random.

    With `in_order`, batches take the rows in order; with `rows_continue` also each row continues the same row of the
    previous batch.
    """

    count: int
    in_order: bool = False
    rows_continue: bool = False

    @abstractmethod
    def rows(self, row_numbers: IntArray) -> TextRows:
        """The rows with these numbers."""

    @abstractmethod
    def token_indices(self, row_numbers: IntArray) -> IntArray:
        """The index in the shard of each token of these rows, -1 for padding."""


def starts_document(offsets: IntArray, indices: IntArray) -> NDArray[np.bool_]:
    """Whether a document of the shard with these offsets begins at each of these tokens."""
    # the first document that begins after each token
    following = np.searchsorted(offsets, indices, side="right")
    is_start: NDArray[np.bool_] = offsets[following - 1] == indices
    return is_start


class RowLayout(ABC):
    """A layout of text as rows."""

    @abstractmethod
    def arrange(self, random: np.random.Generator | None, epoch: int = 0) -> RowArrangement:
        """The rows of epoch number `epoch`; with `random` None the fixed rows of held-out text."""


class StreamLayout(RowLayout):
    """A layout of the concatenated documents of a shard.

    In training the stream is circular with a random start in each epoch, so that every token is a target.
    """

    def __init__(self, shard: TokenShard, length: int, *, shifted: bool) -> None:
        self._shard = shard
        self._length = length
        self._shifted = shifted

    def arrange(self, random: np.random.Generator | None, epoch: int = 0) -> RowArrangement:
        # in training the stream is circular: its last target is the token that it starts with
        count = len(self._shard.tokens)
        if random is not None:
            return self._arrange_stream(int(random.integers(count)), count, epoch)
        # Without wrap-around, the first token has no preceding token to be predicted from.
        return self._arrange_stream(0, count - self._shifted, epoch)

    @abstractmethod
    def _arrange_stream(self, start: int, targets: int, epoch: int) -> RowArrangement:
        """The rows over `targets` targets, the first of which follows the token at `start`."""


class WindowLayout(StreamLayout):
    """Consecutive windows of `length` tokens over the concatenated documents.

    The last window overlaps the previous one to have full length, and its repeated targets are ignored.
    """

    def _arrange_stream(self, start: int, targets: int, epoch: int) -> "WindowArrangement":
        return WindowArrangement(self._shard, start, targets, self._length)


class WindowArrangement(RowArrangement):
    """Windows over `targets` targets, the first of which follows the token at `start`."""

    def __init__(self, shard: TokenShard, start: int, targets: int, length: int) -> None:
        self._tokens = shard.tokens
        self._offsets = np.asarray(shard.offsets)
        self._start = start
        self._targets = targets
        self.length = min(length, targets)
        self.count = -(-targets // self.length)

    def token_indices(self, row_numbers: IntArray) -> IntArray:
        return self._stream_indices(row_numbers)[:, :-1] % len(self._tokens)

    def rows(self, row_numbers: IntArray) -> TextRows:
        ids = np.asarray(self._tokens[self._stream_indices(row_numbers) % len(self._tokens)], dtype=np.int64)
        tokens = ids[:, :-1].copy()
        targets = ids[:, 1:].copy()
        is_first_copy = np.arange(self.length) >= self._repeated(row_numbers)[:, None]
        # The start of a document is given, not predicted.
        is_start = starts_document(self._offsets, self._stream_indices(row_numbers)[:, 1:] % len(self._tokens))
        targets[~is_first_copy | is_start] = IGNORE_INDEX
        return TextRows(tokens, targets, None, is_first_copy)

    def _row_starts(self, row_numbers: IntArray) -> IntArray:
        # the last row moves to the left until it is full
        return np.minimum(row_numbers * self.length, self._targets - self.length)

    def _repeated(self, row_numbers: IntArray) -> IntArray:
        """How many tokens at the start of each row an earlier row contains too."""
        return row_numbers * self.length - self._row_starts(row_numbers)

    def _stream_indices(self, row_numbers: IntArray) -> IntArray:
        """The indices of the tokens of each row and of the one that follows, not yet wrapped around."""
        return (self._start + self._row_starts(row_numbers))[:, None] + np.arange(self.length + 1)


class RandomWindowLayout(WindowLayout):
    """Windows of `length` tokens that begin at random tokens, drawn with replacement and anew in each epoch (nanoGPT).

    An epoch has as many windows as fit into the text side by side. Held-out text is read in order.
    """

    def arrange(self, random: np.random.Generator | None, epoch: int = 0) -> RowArrangement:
        if random is None:
            return super().arrange(None)
        return RandomWindowArrangement(self._shard, self._length, random, shifted=self._shifted)


class RandomWindowArrangement(WindowArrangement):
    """Windows whose first tokens `random` draws; a token that two of them contain is a target in both."""

    def __init__(self, shard: TokenShard, length: int, random: np.random.Generator, *, shifted: bool) -> None:
        # next to its inputs the last window of a language model has one target more
        super().__init__(shard, 0, len(shard.tokens) - shifted, length)
        self._starts = random.integers(self._targets - self.length + 1, size=self.count)

    def _row_starts(self, row_numbers: IntArray) -> IntArray:
        starts: IntArray = self._starts[row_numbers]
        return starts

    def _repeated(self, row_numbers: IntArray) -> IntArray:
        return np.zeros_like(row_numbers)


class DocumentLayout(RowLayout, RowArrangement):
    """Documents packed into rows of `length`, each with its segment id; longer documents are cut into pieces.

    With `shifted` (for language models), a row contains a token only if the next token is a target: a document of n
    tokens takes n - 1 columns, and the token at a cut is the last target of one piece and the first input of the next.
    Rows are filled up with `pad`.
    """

    def __init__(self, shard: TokenShard, length: int, *, shifted: bool, pad: int) -> None:
        self._tokens = shard.tokens
        self.length = length
        self._shifted = shifted
        self._pad = pad
        self._packed: PackedRows = pack_documents(np.asarray(shard.offsets), length, unused_tail=int(shifted))
        self.count = len(self._packed.row_offsets) - 1

    def arrange(self, random: np.random.Generator | None, epoch: int = 0) -> "DocumentLayout":
        return self

    def token_indices(self, row_numbers: IntArray) -> IntArray:
        return self._locate(row_numbers)[0]

    def rows(self, row_numbers: IntArray) -> TextRows:
        indices, segments = self._locate(row_numbers)
        filled = indices >= 0
        tokens = np.where(filled, self._tokens[indices].astype(np.int64), self._pad)
        targets = np.full_like(tokens, IGNORE_INDEX)
        if self._shifted:
            targets = np.where(filled, self._tokens[(indices + 1) % len(self._tokens)].astype(np.int64), IGNORE_INDEX)
        return TextRows(tokens, targets, segments if segments.any() else None, filled)

    def _locate(self, row_numbers: IntArray) -> tuple[IntArray, IntArray]:
        """The shard index of each token of these rows and the number of its piece in the row, -1 for padding."""
        packed = self._packed
        shape = (len(row_numbers), self.length)
        counts = packed.row_offsets[row_numbers + 1] - packed.row_offsets[row_numbers]
        # The pieces of these rows, the row of each, and its first column.
        chosen = packed.pieces[np.repeat(packed.row_offsets[row_numbers], counts) + ragged_arange(counts)]
        starts = packed.starts[chosen]
        sizes = packed.sizes[chosen]
        row = np.repeat(np.arange(len(row_numbers)), counts)
        preceding = np.cumsum(sizes) - sizes
        # columns count from the first piece of each row
        column = preceding - np.repeat(preceding[np.cumsum(counts) - counts], counts)
        destination = (np.repeat(row, sizes), np.repeat(column, sizes) + ragged_arange(sizes))
        indices = np.full(shape, -1, np.int64)
        segments = np.full(shape, -1, np.int64)
        indices[destination] = np.repeat(starts, sizes) + ragged_arange(sizes)
        segments[destination] = np.repeat(ragged_arange(counts), sizes)
        return indices, segments


class PackedRows(NamedTuple):
    """Piece p is `sizes[p]` tokens from `starts[p]`; row r holds `pieces[row_offsets[r]:row_offsets[r + 1]]`."""

    starts: IntArray
    sizes: IntArray
    pieces: IntArray
    row_offsets: IntArray


def pack_documents(offsets: IntArray, length: int, *, unused_tail: int) -> PackedRows:
    """Cut the documents between `offsets`, without `unused_tail` tokens at their ends, to `length` and pack them."""
    sizes = np.diff(offsets) - unused_tail
    document_starts = offsets[:-1][sizes > 0]
    sizes = sizes[sizes > 0]
    # a document longer than a row is cut into rows and a rest
    piece_counts = -(-sizes // length)
    starts = np.repeat(document_starts, piece_counts) + ragged_arange(piece_counts) * length
    piece_sizes = np.minimum(length, np.repeat(document_starts + sizes, piece_counts) - starts)
    row = best_fit(piece_sizes, length)
    order = np.argsort(row, kind="stable")
    # where each row begins among the pieces in order of their rows
    row_offsets = np.searchsorted(row[order], np.arange((row.max() + 1 if len(row) else 0) + 1))
    return PackedRows(starts, piece_sizes, order, row_offsets)


def best_fit(sizes: IntArray, length: int) -> IntArray:
    """The row of each piece: by descending size, each goes to the row with the least space that fits (Johnson 1973)."""
    assert not len(sizes) or int(sizes.max()) <= length
    rows = np.empty(len(sizes), dtype=np.int64)
    # most pieces of long documents fill a row: they need no search
    is_full = sizes == length
    rows[is_full] = np.arange(int(is_full.sum()))
    count = int(is_full.sum())
    # Rows by their free space; `free_sizes` are the distinct free sizes, sorted.
    open_rows: dict[int, list[int]] = {}
    free_sizes: list[int] = []
    partial = np.flatnonzero(~is_full)
    for piece in partial[np.argsort(-sizes[partial], kind="stable")].tolist():
        size = int(sizes[piece])
        # the first space that is large enough is the smallest such
        index = bisect_left(free_sizes, size)
        if index == len(free_sizes):
            row = count
            free = length
            count = count + 1
        else:
            free = free_sizes[index]
            row = open_rows[free].pop()
            if not open_rows[free]:
                del open_rows[free], free_sizes[index]
        rows[piece] = row
        if free > size:
            if free - size not in open_rows:
                insort(free_sizes, free - size)
            open_rows.setdefault(free - size, []).append(row)
    return rows


class LaneLayout(StreamLayout):
    """The concatenated documents in `rows` equal lanes, each batch with the next `length` tokens of every lane.

    Segment ids number the documents across all epochs and increase in each lane, so that no document attends to
    another.
    """

    def __init__(self, shard: TokenShard, length: int, rows: int, *, shifted: bool, pad: int) -> None:
        super().__init__(shard, length, shifted=shifted)
        self._rows = rows
        self._pad = pad

    def _arrange_stream(self, start: int, targets: int, epoch: int) -> "LaneArrangement":
        return LaneArrangement(self._shard, start, targets, self._length, self._rows, self._pad, epoch)


class LaneArrangement(RowArrangement):
    """Rows over `targets` targets, the first of which follows the token at `start`; row n is in lane n % `rows`."""

    in_order = rows_continue = True

    def __init__(
        self, shard: TokenShard, start: int, targets: int, length: int, rows: int, pad: int, epoch: int
    ) -> None:
        self._tokens = shard.tokens
        self._document_starts = np.asarray(shard.offsets[:-1])
        self._start = start
        self._lanes = rows
        self._pad = pad
        # the bounds of the lanes, counted from `start`
        self._edges = np.arange(rows + 1) * targets // rows
        max_lane_length = int(np.diff(self._edges).max())
        self.length = min(length, max_lane_length)
        self.count = -(-max_lane_length // self.length) * rows
        # an epoch contains a document at most twice: at its start and at its end
        self._first_segment = epoch * 2 * len(self._document_starts)

    def token_indices(self, row_numbers: IntArray) -> IntArray:
        stream_indices, in_lane = self._locate(row_numbers)
        return np.where(in_lane, stream_indices % len(self._tokens), -1)

    def rows(self, row_numbers: IntArray) -> TextRows:
        stream_indices, in_lane = self._locate(row_numbers)
        count = len(self._tokens)
        tokens = np.where(in_lane, self._tokens[stream_indices % count].astype(np.int64), self._pad)
        next_indices = (stream_indices + 1) % count
        following = self._tokens[next_indices].astype(np.int64)
        # the start of a document is given, not predicted
        targets = np.where(in_lane & ~starts_document(self._document_starts, next_indices), following, IGNORE_INDEX)
        document = np.searchsorted(self._document_starts, stream_indices % count, side="right") - 1
        segments = self._first_segment + document + stream_indices // count * len(self._document_starts)
        return TextRows(tokens, targets, np.where(in_lane, segments, -1), in_lane)

    def _locate(self, row_numbers: IntArray) -> tuple[IntArray, NDArray[np.bool_]]:
        """The stream index of each token of these rows, not yet wrapped around, and whether it is in the row's lane."""
        lane = row_numbers % self._lanes
        starts = self._edges[lane] + row_numbers // self._lanes * self.length
        lane_positions = starts[:, None] + np.arange(self.length)
        return self._start + lane_positions, lane_positions < self._edges[lane + 1][:, None]


class WindowRows(RowLayout, RowArrangement):
    """One window of a document per row, the longest first; rows are as long as the longest of those asked for."""

    in_order = True

    def __init__(self, shard: TokenShard, windows: ContextWindows, *, pad: int, across_documents: bool = False) -> None:
        self._tokens = shard.tokens
        self._offsets = np.asarray(shard.offsets)
        self._pad = pad
        if across_documents:
            offsets = np.array([0, len(shard.tokens)])
        else:
            offsets = np.asarray(shard.offsets)
        # the last token of a document is only a target
        sizes = np.diff(offsets) - 1
        document_starts = offsets[:-1][sizes > 0]
        sizes = sizes[sizes > 0]
        counts = 1 + -(-np.maximum(sizes - windows.context, 0) // windows.stride)
        number = ragged_arange(counts)
        starts = np.repeat(document_starts, counts) + number * windows.stride
        lengths = np.minimum(windows.context, np.repeat(document_starts + sizes, counts) - starts)
        # the longest first: rows of a batch are then of similar length, with little padding
        order = np.argsort(-lengths, kind="stable")
        self._starts = starts[order]
        self._lengths = lengths[order]
        self._scored_from = np.where(number > 0, windows.context - windows.stride, 0)[order]
        self.count = len(order)

    def arrange(self, random: np.random.Generator | None, epoch: int = 0) -> "WindowRows":
        return self

    def rows(self, row_numbers: IntArray) -> TextRows:
        starts = self._starts[row_numbers]
        lengths = self._lengths[row_numbers]
        width = int(lengths.max())
        tokens = pad_ragged(self._tokens, starts, lengths, width=width, fill=self._pad)
        # the targets are the tokens one further
        targets = pad_ragged(self._tokens, starts + 1, lengths, width=width, fill=IGNORE_INDEX)
        column = np.arange(width)
        in_window = column < lengths[:, None]
        scored = column >= self._scored_from[row_numbers][:, None]
        # the start of a document is given, not predicted
        is_start = starts_document(self._offsets, starts[:, None] + 1 + column)
        targets[~scored | is_start] = IGNORE_INDEX
        if in_window.all():
            segments = None
        else:
            segments = np.where(in_window, 0, PADDING_SEGMENT)
        return TextRows(tokens, targets, segments, in_window & scored)

    def token_indices(self, row_numbers: IntArray) -> IntArray:
        column = np.arange(int(self._lengths[row_numbers].max()))
        indices = self._starts[row_numbers][:, None] + column
        return np.where(column < self._lengths[row_numbers][:, None], indices, -1)


def ragged_arange(lengths: IntArray) -> IntArray:
    """The concatenated ranges 0, .., lengths[0] - 1, 0, .., lengths[1] - 1, and so on."""
    ends = np.cumsum(lengths)
    return np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - lengths, lengths)


def gather_ragged(flat: NDArray[Any], starts: IntArray, lengths: IntArray) -> IntArray:
    """The concatenation of `flat[starts[i]:starts[i] + lengths[i]]` over i."""
    return np.asarray(flat[np.repeat(starts, lengths) + ragged_arange(lengths)], dtype=np.int64)


def pad_ragged(flat: NDArray[Any], starts: IntArray, lengths: IntArray, *, width: int, fill: int) -> IntArray:
    """The slices `flat[starts[i]:starts[i] + lengths[i]]` as rows of `width`, padded on the right with `fill`."""
    out = np.full((len(starts), width), fill, dtype=np.int64)
    out[np.repeat(np.arange(len(starts)), lengths), ragged_arange(lengths)] = gather_ragged(flat, starts, lengths)
    return out
