"""Overlapping windows over the documents of a text, so that every scored token has earlier tokens before it."""

import numpy as np

from manyformer.batches import IGNORE_INDEX
from manyformer.context_windows import ContextWindows
from manyformer.core import PADDING_SEGMENT
from manyformer.data.ragged import pad_ragged, ragged_arange
from manyformer.data.row_layouts import RowArrangement, RowLayout, TextRows, starts_document
from manyformer.data.token_shards import TokenShard
from manyformer.type_aliases import IntArray


class WindowRows(RowLayout, RowArrangement):
    """One window of a document per row, the longest first; rows are as long as the longest of those asked for."""

    in_order = True

    def __init__(self, shard: TokenShard, windows: ContextWindows, *, pad: int, across_documents: bool = False) -> None:
        self._tokens, self._offsets, self._pad = shard.tokens, np.asarray(shard.offsets), pad
        context, stride = windows
        offsets = np.array([0, len(shard.tokens)]) if across_documents else np.asarray(shard.offsets)
        # the last token of a document is only a target
        sizes = np.diff(offsets) - 1
        document_starts, sizes = offsets[:-1][sizes > 0], sizes[sizes > 0]
        counts = 1 + -(-np.maximum(sizes - context, 0) // stride)
        number = ragged_arange(counts)
        starts = np.repeat(document_starts, counts) + number * stride
        lengths = np.minimum(context, np.repeat(document_starts + sizes, counts) - starts)
        order = np.argsort(-lengths, kind="stable")
        self._starts, self._lengths = starts[order], lengths[order]
        self._scored_from = np.where(number > 0, context - stride, 0)[order]
        self.count = len(order)

    def arrange(self, random: np.random.Generator | None, epoch: int = 0) -> "WindowRows":
        return self

    def rows(self, row_numbers: IntArray) -> TextRows:
        starts, lengths = self._starts[row_numbers], self._lengths[row_numbers]
        width = int(lengths.max())
        tokens = pad_ragged(self._tokens, starts, lengths, width=width, fill=self._pad)
        targets = pad_ragged(self._tokens, starts + 1, lengths, width=width, fill=IGNORE_INDEX)
        column = np.arange(width)
        in_window, scored = column < lengths[:, None], column >= self._scored_from[row_numbers][:, None]
        # the start of a document is given, not predicted
        is_start = starts_document(self._offsets, starts[:, None] + 1 + column)
        targets[~scored | is_start] = IGNORE_INDEX
        segments = None if in_window.all() else np.where(in_window, 0, PADDING_SEGMENT)
        return TextRows(tokens, targets, segments, in_window & scored)

    def token_indices(self, row_numbers: IntArray) -> IntArray:
        column = np.arange(int(self._lengths[row_numbers].max()))
        indices = self._starts[row_numbers][:, None] + column
        return np.where(column < self._lengths[row_numbers][:, None], indices, -1)
