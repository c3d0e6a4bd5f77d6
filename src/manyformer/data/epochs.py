"""How an epoch is laid out: which batches there are, and how one is made; and validation data in a fixed order."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from manyformer.batches import IGNORE_INDEX, Batch, ClassificationBatch, ImageClassificationBatch

# The seed of whatever must be mixed but the same in every run.
FIXED = 20170612


class Epoch(ABC):
    """The batches of one pass over the data, made one at a time, each at any time.

    `goes_on` says that row r of each batch goes on with row r of the batch before it, also from epoch to epoch: the
    numbers of documents only rise.
    """

    goes_on: bool = False

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def batch(self, number: int) -> Batch:
        """Batch `number` of the epoch, always the same one."""


class EpochPlan(ABC):
    """A way to make epochs of some data."""

    fingerprint: str
    """Equal when the data and its arrangement are."""

    @abstractmethod
    def epoch(self, seed: int, number: int) -> Epoch:
        """The shuffled epoch `number`; equal seeds and numbers give equal batches."""


class ProcessShare(NamedTuple):
    """Which rows of each batch are ours: row r where r % world == rank."""

    rank: int = 0
    world: int = 1


def shared(batch: Batch, share: ProcessShare) -> Batch:
    """Our rows; where a batch has too few for all, a row whose targets all are IGNORE, so that every rank has work."""
    if share.world == 1:
        return batch
    if share.rank < len(batch[0]):
        rows = (None if t is None else t[share.rank :: share.world].contiguous() for t in batch)
        return type(batch)(*rows)  # type: ignore[arg-type]
    first = type(batch)(*(None if t is None else t[:1].clone() for t in batch))  # type: ignore[arg-type]
    (first.labels if isinstance(first, ClassificationBatch | ImageClassificationBatch) else first.targets).fill_(
        IGNORE_INDEX
    )
    return first


class TextUnits(NamedTuple):
    """What is behind the targets of a split: their number, and the characters and bytes of the text they spell."""

    targets: int
    characters: int
    bytes: int


class HeldOutBatches:
    """Held-out data: the same batches in the same order, every time it is iterated over.

    `units` is None where the targets do not spell a text (masked tokens, labels).
    """

    def __init__(self, epoch: Epoch, units: TextUnits | None, share: ProcessShare | None = None) -> None:
        self._epoch, self.units, self.goes_on = epoch, units, epoch.goes_on
        self._share = share or ProcessShare()

    def __len__(self) -> int:
        return len(self._epoch)

    def __iter__(self) -> Iterator[Batch]:
        for number in range(len(self._epoch)):
            yield shared(self._epoch.batch(number), self._share)

    def shard(self, rank: int, world: int) -> "HeldOutBatches":
        """Our rows of each batch; `units` stay those of all ranks together."""
        return HeldOutBatches(self._epoch, self.units, ProcessShare(rank, world))


def generator(*seeds: int) -> np.random.Generator:
    """Random numbers that depend on these numbers alone."""
    return np.random.default_rng(seeds)
