"""Layouts of text as rows of equal length: windows of the joined documents, in order or at random, or packed ones."""

from abc import ABC, abstractmethod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from manyformer.batches import IGNORE_INDEX
from manyformer.data.packing import PackedRows, pack_documents
from manyformer.data.ragged import ragged_arange
from manyformer.data.token_shards import TokenShard
from manyformer.type_aliases import IntArray


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
        self._shard, self._length, self._shifted = shard, length, shifted

    def arrange(self, random: np.random.Generator | None, epoch: int = 0) -> RowArrangement:
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
        self._tokens, self._offsets = shard.tokens, np.asarray(shard.offsets)
        self._start, self._targets = start, targets
        self.length = min(length, targets)
        self.count = -(-targets // self.length)

    def token_indices(self, row_numbers: IntArray) -> IntArray:
        return self._stream_indices(row_numbers)[:, :-1] % len(self._tokens)

    def rows(self, row_numbers: IntArray) -> TextRows:
        ids = np.asarray(self._tokens[self._stream_indices(row_numbers) % len(self._tokens)], dtype=np.int64)
        tokens, targets = ids[:, :-1].copy(), ids[:, 1:].copy()
        is_first_copy = np.arange(self.length) >= self._repeated(row_numbers)[:, None]
        # The start of a document is given, not predicted.
        is_start = starts_document(self._offsets, self._stream_indices(row_numbers)[:, 1:] % len(self._tokens))
        targets[~is_first_copy | is_start] = IGNORE_INDEX
        return TextRows(tokens, targets, None, is_first_copy)

    def _row_starts(self, row_numbers: IntArray) -> IntArray:
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
        self._tokens, self.length, self._shifted, self._pad = shard.tokens, length, shifted, pad
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
        packed, shape = self._packed, (len(row_numbers), self.length)
        counts = packed.row_offsets[row_numbers + 1] - packed.row_offsets[row_numbers]
        # The pieces of these rows, the row of each, and its first column.
        chosen = packed.pieces[np.repeat(packed.row_offsets[row_numbers], counts) + ragged_arange(counts)]
        starts, sizes, row = packed.starts[chosen], packed.sizes[chosen], np.repeat(np.arange(len(row_numbers)), counts)
        preceding = np.cumsum(sizes) - sizes
        column = preceding - np.repeat(preceding[np.cumsum(counts) - counts], counts)
        destination = (np.repeat(row, sizes), np.repeat(column, sizes) + ragged_arange(sizes))
        indices, segments = np.full(shape, -1, np.int64), np.full(shape, -1, np.int64)
        indices[destination] = np.repeat(starts, sizes) + ragged_arange(sizes)
        segments[destination] = np.repeat(ragged_arange(counts), sizes)
        return indices, segments
