"""Random numbers of episodes as a function of a seed and a counter: every episode can be repeated on its own.

The function is the finalizer of SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number
generators", section 5) applied to each counter.
"""

import numpy as np
from numpy.typing import NDArray

from manyformer.type_aliases import FloatArray, IntArray

Words = NDArray[np.uint64]
"""Random bits, 64 for each element."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST_FACTOR, _SECOND_FACTOR = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_SEED_MASK = np.uint64((1 << 31) - 1)


def random_words(seeds: IntArray, counters: IntArray | int) -> Words:
    """Random bits for each pair of a seed and a counter; both broadcast."""
    with np.errstate(over="ignore"):
        words = _finalize(seeds.astype(np.uint64) + _GOLDEN)
        return _finalize(words + _GOLDEN * np.asarray(counters).astype(np.uint64))


def random_fractions(seeds: IntArray, counters: IntArray | int) -> FloatArray:
    """Random numbers, uniform from 0 up to 1, for each pair of a seed and a counter."""
    fractions: FloatArray = (random_words(seeds, counters) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return fractions


def episode_seeds(row_seeds: IntArray, episodes: IntArray | int) -> IntArray:
    """The seed, below 2^31, of each row's episode with this number."""
    return (random_words(row_seeds, episodes) & _SEED_MASK).astype(np.int64)


def row_seeds(seed: int, rows: int) -> IntArray:
    """The seeds of all rows of an environment, for a run with this seed."""
    return (random_words(np.full(rows, seed), np.arange(rows)) >> np.uint64(1)).astype(np.int64)


def _finalize(words: Words) -> Words:
    words = (words ^ (words >> np.uint64(30))) * _FIRST_FACTOR
    words = (words ^ (words >> np.uint64(27))) * _SECOND_FACTOR
    return words ^ (words >> np.uint64(31))
