"""Contiguous layout of text: each row of a batch continues the same row of the previous batch."""

import numpy as np
from numpy.typing import NDArray

from manyformer.batches import IGNORE_INDEX
from manyformer.data.row_layouts import RowArrangement, StreamLayout, TextRows, starts_document
from manyformer.data.token_shards import TokenShard
from manyformer.type_aliases import IntArray


class LaneLayout(StreamLayout):
    """The concatenated documents in `rows` equal lanes, each batch with the next `length` tokens of every lane.

    Segment ids number the documents across all epochs and increase in each lane, so that no document attends to
    another.
    """

    def __init__(self, shard: TokenShard, length: int, rows: int, *, shifted: bool, pad: int) -> None:
        super().__init__(shard, length, shifted=shifted)
        self._rows, self._pad = rows, pad

    def _arrange_stream(self, start: int, targets: int, epoch: int) -> "LaneArrangement":
        return LaneArrangement(self._shard, start, targets, self._length, self._rows, self._pad, epoch)


class LaneArrangement(RowArrangement):
    """Rows over `targets` targets, the first of which follows the token at `start`; row n is in lane n % `rows`."""

    in_order = rows_continue = True

    def __init__(
        self, shard: TokenShard, start: int, targets: int, length: int, rows: int, pad: int, epoch: int
    ) -> None:
        self._tokens, self._document_starts = shard.tokens, np.asarray(shard.offsets[:-1])
        self._start, self._lanes, self._pad = start, rows, pad
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
