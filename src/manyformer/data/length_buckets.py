"""Batches of sequences of similar length within a budget of padded tokens."""

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterator
from typing import final

import numpy as np

from manyformer.batches import Batch
from manyformer.data.epochs import FIXED_SEED, Epoch, EpochPlan, random_generator
from manyformer.type_aliases import IntArray


class SequenceDataset(ABC):
    """A data set of examples with known lengths that can be collated into batches."""

    lengths: IntArray
    """The length of each example, for pairs that of the longer side."""
    tie_breakers: IntArray
    """A second sort key for examples of equal length, so that the shorter sides of a batch have similar lengths."""
    fingerprint: str

    @abstractmethod
    def make_batch(self, indices: IntArray) -> Batch:
        """A batch of the examples at these indices, in this order."""


def batches_in_order(dataset: SequenceDataset, rows: int) -> Iterator[Batch]:
    """All examples in their order, `rows` in a batch."""
    for start in range(0, len(dataset.lengths), rows):
        yield dataset.make_batch(np.arange(start, min(start + rows, len(dataset.lengths))))


@final
class LengthBuckets(EpochPlan):
    """Batches of at most `budget` padded tokens (rows times the longest length), with at least one row each."""

    def __init__(self, examples: SequenceDataset, indices: IntArray, budget: int) -> None:
        self._examples, self._indices, self._budget = examples, indices, budget
        self.fingerprint = f"{examples.fingerprint}-{len(indices)}-{budget}"

    def epoch(self, seed: int, number: int) -> "BucketEpoch":
        random = random_generator(seed, number)
        indices = random.permutation(self._indices)
        bounds, indices = self._sort_and_split(indices)
        return BucketEpoch(self._examples, indices, bounds, random.permutation(len(bounds) - 1))

    def fixed_epoch(self) -> "BucketEpoch":
        """The fixed epoch of held-out data, shuffled so that its first batches represent all of them."""
        bounds, indices = self._sort_and_split(self._indices)
        return BucketEpoch(self._examples, indices, bounds, random_generator(FIXED_SEED).permutation(len(bounds) - 1))

    def _sort_and_split(self, indices: IntArray) -> tuple[IntArray, IntArray]:
        # a stable sort, which preserves the shuffled order of equal lengths
        lengths = self._examples.lengths[indices]
        indices = indices[np.lexsort((self._examples.tie_breakers[indices], lengths))]
        return bucket_bounds(self._examples.lengths[indices], self._budget), indices


class BucketEpoch(Epoch):
    """An epoch of buckets: batch i has the examples of bucket `order[i]`, between two of the `bounds`."""

    def __init__(self, examples: SequenceDataset, indices: IntArray, bounds: IntArray, order: IntArray) -> None:
        self._examples, self._indices, self._bounds, self._order = examples, indices, bounds, order

    def __len__(self) -> int:
        return len(self._order)

    def batch(self, number: int) -> Batch:
        bucket = self._order[number]
        return self._examples.make_batch(self._indices[self._bounds[bucket] : self._bounds[bucket + 1]])


def bucket_bounds(lengths: IntArray, budget: int) -> IntArray:
    """The bounds of batches in ascending `lengths`: each is the longest with rows times last length within `budget`."""
    bounds = [0]
    while bounds[-1] < len(lengths):
        start = bounds[-1]
        # the padded size increases with the stop index, so the last one that fits is found by bisection
        stops = range(start + 1, len(lengths) + 1)
        rows = bisect_right(stops, budget, key=lambda stop: (stop - start) * int(lengths[stop - 1]))
        bounds.append(start + max(1, rows))
    return np.array(bounds)
