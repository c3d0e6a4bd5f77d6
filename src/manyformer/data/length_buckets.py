"""Batches of sequences of similar length within a budget of padded tokens."""

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterator
from typing import final

import numpy as np

from manyformer.batches import Batch
from manyformer.data.epochs import FIXED_SEED, Epoch, EpochPlan, HeldOutBatches, random_generator
from manyformer.errors import UserError
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


def batches_in_order(dataset: SequenceDataset, rows: int, budget: int | None = None) -> Iterator[Batch]:
    """All examples in their order: at most `rows` in a batch, and `budget` padded tokens unless one alone has more."""
    start = longest = 0
    for number, length in enumerate(dataset.lengths.tolist()):
        longest = max(longest, length)
        count = number - start
        if count and (count == rows or (budget is not None and (count + 1) * longest > budget)):
            yield dataset.make_batch(np.arange(start, number))
            start = number
            longest = length
    if start < len(dataset.lengths):
        yield dataset.make_batch(np.arange(start, len(dataset.lengths)))


def held_out_batches(examples: SequenceDataset, batch_tokens: int) -> HeldOutBatches:
    """All examples in a fixed order, whose targets do not encode a text."""
    return HeldOutBatches(LengthBuckets(examples, batch_tokens).fixed_epoch(), None)


@final
class LengthBuckets(EpochPlan):
    """Batches of at most `budget` padded tokens (rows times the longest length), with at least one row each.

    `indices` are those of the examples to read, by default all.
    """

    def __init__(self, examples: SequenceDataset, budget: int, indices: IntArray | None = None) -> None:
        self.examples = examples
        self._budget = budget
        if indices is None:
            self.indices = np.arange(len(examples.lengths))
        else:
            self.indices = indices
        self.fingerprint = f"{examples.fingerprint}-{len(self.indices)}-{budget}"

    @property
    def max_length(self) -> int:
        """The length of the longest example that is read."""
        return int(self.examples.lengths[self.indices].max())

    def epoch(self, seed: int, number: int) -> "BucketEpoch":
        random = random_generator(seed, number)
        return BucketEpoch(self.examples, random.permutation(self.indices), self._budget, random)

    def fixed_epoch(self) -> "BucketEpoch":
        """The fixed epoch of held-out data, shuffled so that its first batches represent all of them."""
        return BucketEpoch(self.examples, self.indices, self._budget, random_generator(FIXED_SEED))


class BucketEpoch(Epoch):
    """An epoch of buckets of examples of similar length, in an order drawn from `random`."""

    def __init__(self, examples: SequenceDataset, indices: IntArray, budget: int, random: np.random.Generator) -> None:
        self._examples = examples
        # a stable sort, which preserves the shuffled order of equal lengths
        self._indices = indices[np.lexsort((examples.tie_breakers[indices], examples.lengths[indices]))]
        self._bounds = bucket_bounds(examples.lengths[self._indices], budget)
        self._order = random.permutation(len(self._bounds) - 1)

    def __len__(self) -> int:
        return len(self._order)

    def batch(self, number: int) -> Batch:
        bucket = self._order[number]
        return self._examples.make_batch(self._indices[self._bounds[bucket] : self._bounds[bucket + 1]])


def training_buckets(
    examples: SequenceDataset, batch_tokens: int, *, noun: str, max_length: int, unit: str = "tokens"
) -> LengthBuckets:
    """Batches of the training examples of at most `max_length` tokens. Raises UserError if they fill no batch."""
    buckets = LengthBuckets(examples, batch_tokens, np.flatnonzero(examples.lengths <= max_length))
    count = len(buckets.indices)
    if not count:
        raise UserError(
            f"no training {noun} is as short as data.max_length allows ({max_length} {unit}); set it higher"
        )
    if buckets.max_length > batch_tokens:
        raise UserError(
            f"the longest training {noun} has {buckets.max_length} {unit}, more than a batch of {batch_tokens} "
            "(batch.tokens); set batch.tokens higher or data.max_length lower"
        )
    total = int(examples.lengths[buckets.indices].sum())
    check_fills_batch(total, batch_tokens, f"the {count:,} training {noun}s have", f"{noun}s")
    return buckets


def check_fills_batch(
    total: int, batch_tokens: int, subject_and_verb: str, source: str, *, unit: str = "tokens"
) -> None:
    """Raise UserError if the training data does not fill one batch."""
    if total < batch_tokens:
        raise UserError(
            f"{subject_and_verb} {total:,} {unit}, fewer than one batch of {batch_tokens:,} (batch.tokens); "
            f"give more {source} or set batch.tokens lower"
        )


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
