"""Batches of sequences of similar length, as many as a budget of padded tokens allows."""

from abc import ABC, abstractmethod
from bisect import bisect_right
from typing import final

import numpy as np

from manyformer.batches import Batch
from manyformer.data.epochs import FIXED, Epoch, EpochPlan, generator
from manyformer.data.ragged import IntArray


class SequenceDataset(ABC):
    """Numbered examples with a length each, from which a batch of any of them can be made."""

    lengths: IntArray
    """What an example costs: tokens of its longer side."""
    ties: IntArray
    """Orders examples of equal length, so that their other sides are alike too."""
    fingerprint: str

    @abstractmethod
    def make(self, numbers: IntArray) -> Batch:
        """A batch of these examples, in this order."""


@final
class LengthBuckets(EpochPlan):
    """Batches of at most `budget` padded tokens (rows times the longest of them), never fewer than one row."""

    def __init__(self, examples: SequenceDataset, kept: IntArray, budget: int) -> None:
        self._examples, self._kept, self._budget = examples, kept, budget
        self.fingerprint = f"{examples.fingerprint}-{len(kept)}-{budget}"

    def epoch(self, seed: int, number: int) -> "BucketEpoch":
        random = generator(seed, number)
        mixed = random.permutation(self._kept)
        bounds, mixed = self._cut(mixed)
        return BucketEpoch(self._examples, mixed, bounds, random.permutation(len(bounds) - 1))

    def fixed(self) -> "BucketEpoch":
        """The epoch of held-out data, always the same: mixed, so that its first batches are like all of them."""
        bounds, numbers = self._cut(self._kept)
        return BucketEpoch(self._examples, numbers, bounds, generator(FIXED).permutation(len(bounds) - 1))

    def _cut(self, numbers: IntArray) -> tuple[IntArray, IntArray]:
        # A stable sort: equal lengths keep the order that the shuffle gave them.
        lengths = self._examples.lengths[numbers]
        numbers = numbers[np.lexsort((self._examples.ties[numbers], lengths))]
        return bucket_bounds(self._examples.lengths[numbers], self._budget), numbers


class BucketEpoch(Epoch):
    """Batch i holds the examples between two bounds; which two, the shuffled order says."""

    def __init__(self, examples: SequenceDataset, numbers: IntArray, bounds: IntArray, order: IntArray) -> None:
        self._examples, self._numbers, self._bounds, self._order = examples, numbers, bounds, order

    def __len__(self) -> int:
        return len(self._order)

    def batch(self, number: int) -> Batch:
        place = self._order[number]
        return self._examples.make(self._numbers[self._bounds[place] : self._bounds[place + 1]])


def bucket_bounds(lengths: IntArray, budget: int) -> IntArray:
    """Where batches begin and end in ascending `lengths`: each as long as rows times its last length fit the budget."""
    bounds = [0]
    while bounds[-1] < len(lengths):
        begin = bounds[-1]
        # The padded size grows with the end, so the last end that fits can be found by halving.
        sizes = range(begin + 1, len(lengths) + 1)
        fit = bisect_right(sizes, budget, key=lambda end: (end - begin) * int(lengths[end - 1]))
        bounds.append(begin + max(1, fit))
    return np.array(bounds)
