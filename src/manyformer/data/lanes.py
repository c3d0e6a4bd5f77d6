"""Running text in lanes: every row of a batch goes on where the same row of the batch before it ended."""

import numpy as np
from numpy.typing import NDArray

from manyformer.batches import IGNORE_INDEX
from manyformer.data.ragged import IntArray
from manyformer.data.row_layouts import RowArrangement, RowLayout, TextRows
from manyformer.data.token_shards import TokenShard
from manyformer.data.tokenizer import Tokenizer


class LaneLayout(RowLayout):
    """The stream of all documents in `rows` equal parts side by side, `length` tokens of each in every batch.

    In training the stream is a ring that begins at another place every epoch. Segments number the documents through all
    epochs, rising in each lane, so that nobody takes another document's tokens for its own.
    """

    def __init__(self, shard: TokenShard, length: int, rows: int, *, shifted: bool) -> None:
        self._shard, self._length, self._rows, self._shifted = shard, length, rows, shifted

    def arrange(self, random: np.random.Generator | None, epoch: int = 0) -> "LaneArrangement":
        count = len(self._shard.tokens)
        if random is not None:
            return LaneArrangement(self._shard, int(random.integers(count)), count, self._length, self._rows, epoch)
        return LaneArrangement(self._shard, 0, count - self._shifted, self._length, self._rows, epoch)


class LaneArrangement(RowArrangement):
    """Rows over `targets` targets, the first of which follows the token at `begin`: row n is of lane n % `rows`."""

    goes_on = True

    def __init__(self, shard: TokenShard, begin: int, targets: int, length: int, rows: int, epoch: int) -> None:
        self._tokens, self._begins = shard.tokens, np.asarray(shard.offsets[:-1])
        self._begin, self._lanes = begin, rows
        # where each lane begins and ends, counted from `begin`
        self._edges = np.arange(rows + 1) * targets // rows
        widest = int(np.diff(self._edges).max())
        self.length = min(length, widest)
        self.count = -(-widest // self.length) * rows
        # a ring passes each document twice at most: at the beginning of an epoch and at its end
        self._first = epoch * 2 * len(self._begins)

    def places(self, numbers: IntArray) -> IntArray:
        index, own = self._put(numbers)
        return np.where(own, index % len(self._tokens), -1)

    def rows(self, numbers: IntArray) -> TextRows:
        index, own = self._put(numbers)
        count = len(self._tokens)
        tokens = np.where(own, self._tokens[index % count].astype(np.int64), Tokenizer.pad)
        following = self._tokens[(index + 1) % count].astype(np.int64)
        # that a text begins is given, not predicted
        targets = np.where(own & (following != Tokenizer.bos), following, IGNORE_INDEX)
        document = np.searchsorted(self._begins, index % count, side="right") - 1
        segments = self._first + document + index // count * len(self._begins)
        return TextRows(tokens, targets, np.where(own, segments, -1), own)

    def _put(self, numbers: IntArray) -> tuple[IntArray, NDArray[np.bool_]]:
        """Where the tokens of these rows stand, counted on through the end of the ring, and which are of their lane."""
        lane = numbers % self._lanes
        starts = self._edges[lane] + numbers // self._lanes * self.length
        places = starts[:, None] + np.arange(self.length)
        return self._begin + places, places < self._edges[lane + 1][:, None]
