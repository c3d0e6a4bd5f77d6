"""Best-fit packing of pieces of documents into rows, so that little padding remains."""

from bisect import bisect_left, insort
from typing import NamedTuple

import numpy as np

from manyformer.data.ragged import ragged_arange
from manyformer.type_aliases import IntArray


class PackedRows(NamedTuple):
    """Piece p is `sizes[p]` tokens from `starts[p]`; row r holds `pieces[row_offsets[r]:row_offsets[r + 1]]`."""

    starts: IntArray
    sizes: IntArray
    pieces: IntArray
    row_offsets: IntArray


def pack_documents(offsets: IntArray, length: int, *, unused_tail: int) -> PackedRows:
    """Cut the documents between `offsets`, without `unused_tail` tokens at their ends, to `length` and pack them."""
    sizes = np.diff(offsets) - unused_tail
    document_starts, sizes = offsets[:-1][sizes > 0], sizes[sizes > 0]
    piece_counts = -(-sizes // length)
    starts = np.repeat(document_starts, piece_counts) + ragged_arange(piece_counts) * length
    piece_sizes = np.minimum(length, np.repeat(document_starts + sizes, piece_counts) - starts)
    row = best_fit(piece_sizes, length)
    order = np.argsort(row, kind="stable")
    row_offsets = np.searchsorted(row[order], np.arange((row.max() + 1 if len(row) else 0) + 1))
    return PackedRows(starts, piece_sizes, order, row_offsets)


def best_fit(sizes: IntArray, length: int) -> IntArray:
    """The row of each piece: by descending size, each goes to the row with the least space that fits (Johnson 1973)."""
    assert not len(sizes) or int(sizes.max()) <= length
    rows = np.empty(len(sizes), dtype=np.int64)
    is_full = sizes == length
    rows[is_full] = np.arange(int(is_full.sum()))
    count = int(is_full.sum())
    # Rows by their free space; `free_sizes` are the distinct free sizes, sorted.
    open_rows: dict[int, list[int]] = {}
    free_sizes: list[int] = []
    partial = np.flatnonzero(~is_full)
    for piece in partial[np.argsort(-sizes[partial], kind="stable")].tolist():
        size = int(sizes[piece])
        index = bisect_left(free_sizes, size)
        if index == len(free_sizes):
            row, free, count = count, length, count + 1
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
