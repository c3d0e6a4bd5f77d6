"""Vectorized gathering of rows of different lengths from a flat array, without a Python loop over rows."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from manyformer.type_aliases import IntArray


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
