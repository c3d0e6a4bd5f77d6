"""Best fit: which pieces of documents share a row so that few places stay empty."""

from bisect import bisect_left, insort
from typing import NamedTuple

import numpy as np

from manyformer.data.ragged import IntArray, ragged_arange


class PackedRows(NamedTuple):
    """Piece p is `sizes[p]` tokens from `starts[p]`; row r holds the pieces `pieces[first[r]:first[r + 1]]`."""

    starts: IntArray
    sizes: IntArray
    pieces: IntArray
    first: IntArray


def pack(offsets: IntArray, length: int, *, spare: int) -> PackedRows:
    """Documents between `offsets`, less `spare` tokens at the end of each, cut to pieces of `length` and packed."""
    sizes = np.diff(offsets) - spare
    begins, sizes = offsets[:-1][sizes > 0], sizes[sizes > 0]
    cuts = -(-sizes // length)
    starts = np.repeat(begins, cuts) + ragged_arange(cuts) * length
    left = np.minimum(length, np.repeat(begins + sizes, cuts) - starts)
    row = best_fit(left, length)
    order = np.argsort(row, kind="stable")
    first = np.searchsorted(row[order], np.arange((row.max() + 1 if len(row) else 0) + 1))
    return PackedRows(starts, left, order, first)


def best_fit(sizes: IntArray, length: int) -> IntArray:
    """The row of each piece, the largest piece first into the row where it leaves least room (Johnson 1973)."""
    assert not len(sizes) or int(sizes.max()) <= length
    rows = np.empty(len(sizes), dtype=np.int64)
    full = sizes == length
    rows[full] = np.arange(int(full.sum()))
    count = int(full.sum())
    # Rows by the room they have; `rooms` are those that some row has, sorted.
    open_rows: dict[int, list[int]] = {}
    rooms: list[int] = []
    others = np.flatnonzero(~full)
    for piece in others[np.argsort(-sizes[others], kind="stable")].tolist():
        size = int(sizes[piece])
        place = bisect_left(rooms, size)
        if place == len(rooms):
            row, room, count = count, length, count + 1
        else:
            room = rooms[place]
            row = open_rows[room].pop()
            if not open_rows[room]:
                del open_rows[room], rooms[place]
        rows[piece] = row
        if room > size:
            if room - size not in open_rows:
                insort(rooms, room - size)
            open_rows.setdefault(room - size, []).append(row)
    return rows
