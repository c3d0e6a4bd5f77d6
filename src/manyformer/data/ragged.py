"""Rows of different lengths gathered from one flat array at once, without a Python loop over rows or tokens."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]


def ragged_arange(lengths: IntArray) -> IntArray:
    """0, 1, .., lengths[0] - 1, 0, 1, .., lengths[1] - 1, and so on."""
    ends = np.cumsum(lengths)
    return np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - lengths, lengths)


def gather(flat: NDArray[Any], starts: IntArray, lengths: IntArray) -> IntArray:
    """`flat[starts[i]:starts[i] + lengths[i]]` for each i, end to end."""
    return np.asarray(flat[np.repeat(starts, lengths) + ragged_arange(lengths)], dtype=np.int64)


def padded(flat: NDArray[Any], starts: IntArray, lengths: IntArray, *, width: int, fill: int) -> IntArray:
    """The same as rows of `width`, filled up at their right ends."""
    out = np.full((len(starts), width), fill, dtype=np.int64)
    out[np.repeat(np.arange(len(starts)), lengths), ragged_arange(lengths)] = gather(flat, starts, lengths)
    return out
