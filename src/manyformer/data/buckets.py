"""Batches of sequences of similar length, as many as a budget of padded tokens allows."""

from abc import ABC, abstractmethod
from bisect import bisect_right
from typing import final

import numpy as np

from manyformer.batches import Batch
from manyformer.data.plan import FIXED, Epoch, Plan, generator
from manyformer.data.ragged import Whole


class Sequences(ABC):
    """Numbered examples with a length each, from which a batch of any of them can be made."""

    lengths: Whole
    """What an example costs: tokens of its longer side."""
    ties: Whole
    """Orders examples of equal length, so that their other sides are alike too."""
    fingerprint: str

    @abstractmethod
    def make(self, numbers: Whole) -> Batch:
        """A batch of these examples, in this order."""


@final
class Buckets(Plan):
    """Batches of at most `budget` padded tokens (rows times the longest of them), never fewer than one row."""

    def __init__(self, examples: Sequences, kept: Whole, budget: int) -> None:
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

    def _cut(self, numbers: Whole) -> tuple[Whole, Whole]:
        # A stable sort: equal lengths keep the order that the shuffle gave them.
        lengths = self._examples.lengths[numbers]
        numbers = numbers[np.lexsort((self._examples.ties[numbers], lengths))]
        return cut(self._examples.lengths[numbers], self._budget), numbers


class BucketEpoch(Epoch):
    """Batch i holds the examples between two bounds; which two, the shuffled order says."""

    def __init__(self, examples: Sequences, numbers: Whole, bounds: Whole, order: Whole) -> None:
        self._examples, self._numbers, self._bounds, self._order = examples, numbers, bounds, order

    def __len__(self) -> int:
        return len(self._order)

    def batch(self, number: int) -> Batch:
        place = self._order[number]
        return self._examples.make(self._numbers[self._bounds[place] : self._bounds[place + 1]])


def cut(lengths: Whole, budget: int) -> Whole:
    """Where batches begin and end in ascending `lengths`: each as long as rows times its last length fit the budget."""
    bounds = [0]
    while bounds[-1] < len(lengths):
        begin = bounds[-1]
        # The padded size grows with the end, so the last end that fits can be found by halving.
        sizes = range(begin + 1, len(lengths) + 1)
        fit = bisect_right(sizes, budget, key=lambda end: (end - begin) * int(lengths[end - 1]))
        bounds.append(begin + max(1, fit))
    return np.array(bounds)
