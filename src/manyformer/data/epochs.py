"""Interfaces of epochs as indexed batches, their division among processes, and held-out batches in fixed order."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from manyformer.batches import Batch, TextUnits
from manyformer.batches.batch import with_layouts

# The seed of shuffles that must be the same in every run.
FIXED_SEED = 20170612


class Epoch(ABC):
    """The batches of one pass over the data, with random access.

    With `rows_continue`, row r of each batch continues row r of the previous batch, also across epochs: segment ids
    only increase.
    """

    rows_continue: bool = False

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def batch(self, number: int) -> Batch:
        """Batch `number` of the epoch, the same at each call: its random numbers are its own, not those of the process.

        A thread may read training batches while another reads held-out ones of the same data."""


class EpochPlan(ABC):
    """A plan that generates the epochs of a data set."""

    fingerprint: str
    """Equal if the data and its arrangement in batches are equal."""

    @abstractmethod
    def epoch(self, seed: int, number: int) -> Epoch:
        """The shuffled epoch `number`; equal seeds and numbers give equal batches."""


class FixedEpochPlan(EpochPlan):
    """A plan of data of which parts are held out, and are read in one fixed epoch."""

    @abstractmethod
    def fixed_epoch(self) -> Epoch:
        """The epoch of held-out data: the same batches in the same order at each call."""


class ProcessShare(NamedTuple):
    """The rows of each batch that a process receives: every row r with r % world == rank."""

    rank: int = 0
    world_size: int = 1


def read_batch(epoch: Epoch, number: int, share: ProcessShare) -> Batch:
    """A batch of an epoch as a process trains on it or scores it: its rows alone, with the layout of their documents.

    This is where a layout is read: once, on the host, and in the thread that reads ahead where there is one."""
    return with_layouts(_select_rows(epoch.batch(number), share))


def _select_rows(batch: Batch, share: ProcessShare) -> Batch:
    """The rows of a batch for one process; if it has none, a row with all targets IGNORE_INDEX, so that it has work."""
    if share.world_size == 1:
        return batch
    if share.rank < len(batch[0]):
        rows = (None if t is None else t[share.rank :: share.world_size].contiguous() for t in batch)
        return type(batch)(*rows)
    first_row = type(batch)(*(None if t is None else t[:1].clone() for t in batch))
    return first_row.ignored()


class HeldOutBatches:
    """Held-out data: the same batches in the same order in every iteration.

    `units` is None if the targets do not encode a text (masked tokens, labels).
    """

    def __init__(self, epoch: Epoch, units: TextUnits | None, share: ProcessShare | None = None) -> None:
        self._epoch = epoch
        self.units = units
        self.rows_continue = epoch.rows_continue
        self._share = share or ProcessShare()

    def __len__(self) -> int:
        return len(self._epoch)

    def __iter__(self) -> Iterator[Batch]:
        for number in range(len(self._epoch)):
            yield read_batch(self._epoch, number, self._share)

    def shard(self, rank: int, world_size: int) -> "HeldOutBatches":
        """The rows of each batch for one rank; `units` remain those of all ranks."""
        return HeldOutBatches(self._epoch, self.units, ProcessShare(rank, world_size))


def random_generator(*seeds: int) -> np.random.Generator:
    """A random generator that is determined by `seeds`."""
    return np.random.default_rng(seeds)
