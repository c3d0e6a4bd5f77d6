"""Epochs of batches with random access, and what reads them: held-out batches, and the endless feed of a training.

An epoch is planned before it is read, a batch is found by its number, and a process reads its share of the rows: the
position of a feed is two numbers, which a checkpoint holds."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, final

import numpy as np
from torch import nn
from typing_extensions import TypedDict

from manyformer.base.errors import UserError
from manyformer.base.files.json_records import Count
from manyformer.base.files.verified_folder import VerifiedFolder
from manyformer.nn.batches import Batch, TextUnits
from manyformer.nn.batches.batch import with_layouts
from manyformer.nn.batches.given_batches import GivenBatch

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
    return share_of(epoch.batch(number), share)


def share_of(batch: Batch, share: ProcessShare) -> Batch:
    """The rows of a batch that a process receives, with the layout of their documents."""
    if share.world_size > 1:
        if isinstance(batch, GivenBatch):
            batch = batch.of_process(share.rank, share.world_size)
        else:
            batch = _select_rows(batch, share)
    return with_layouts(batch)


def _select_rows(batch: Batch, share: ProcessShare) -> Batch:
    """The rows of a batch for one process; if it has none, a row with all targets IGNORE_INDEX, so that it has work."""
    if share.rank < len(batch[0]):
        # contiguous, so that the rows of other processes are not kept in memory
        rows = (None if t is None else t[share.rank :: share.world_size].contiguous() for t in batch)
        return type(batch)(*rows)
    # a process without a row still takes part in the step, in which all synchronize
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


class FeedPosition(TypedDict):
    """The position of a feed, with its seed and the fingerprint of its data."""

    epoch: Count
    batch: Count
    seed: int
    data: str


class TrainingFeed(Iterator[Batch], ABC):
    """An endless stream of training batches; `epoch` counts completed epochs, `batch` the batches of the current one.

    A feed whose batches depend on the model, such as what a policy does in environments, is attached to the model and
    has files of its own in a checkpoint.
    """

    epoch: int
    batch: int
    score_names: tuple[str, ...] = ()
    """The names of the scores that `training_scores` may have."""
    diagnostics: frozenset[str] = frozenset()
    """Those of them that go to the metrics alone, not to the lines of progress."""

    @property
    @abstractmethod
    def batches(self) -> int:
        """The number of batches in the current epoch."""

    @property
    @abstractmethod
    def rows_continue(self) -> bool:
        """Whether row r of each batch continues row r of the previous batch."""

    @property
    def reads_ahead(self) -> bool:
        """Whether its position alone decides the next batch, so that a thread may read it while others are trained on.

        False where batches depend on the weights of the moment, or where the feed has scores or files of its own."""
        return False

    @abstractmethod
    def shard(self, rank: int, world_size: int) -> "TrainingFeed":
        """A feed from this position with a share of the rows of each batch; all ranks together cover every row."""

    @abstractmethod
    def state_dict(self) -> FeedPosition:
        """The position as JSON values: equal on every rank, and valid for any number of ranks."""

    @abstractmethod
    def load_state_dict(self, state: FeedPosition) -> None:
        """Move to a saved position. Raises UserError if it belongs to different data or a different order."""

    def attach(self, model: nn.Module) -> None:
        """Take the model that is trained on this feed; called once, before the first batch."""

    def write_files(self, folder: Path) -> None:
        """Write what the position does not say into the folder of a checkpoint; the main process alone calls it."""

    def read_files(self, files: VerifiedFolder) -> None:
        """Restore what `write_files` wrote; called after `load_state_dict`. Raises DamagedFile."""

    def close(self) -> None:
        """End what the feed has running beside the training; its next batch, if one is taken, is the same."""

    def training_scores(self) -> Mapping[str, float]:
        """Scores of the latest training data for people, such as the mean return of its episodes."""
        return {}

    def progress_scores(self) -> dict[str, float]:
        """The training scores that lines of progress show."""
        return {name: score for name, score in self.training_scores().items() if name not in self.diagnostics}


class SeededFeed(TrainingFeed):
    """A feed whose order a seed decides; `fingerprint` is that of its data."""

    _changed_data: str
    """The sentence for a position in other data."""

    def __init__(self, seed: int, fingerprint: str) -> None:
        self.seed = seed
        self.fingerprint = fingerprint
        self.epoch = self.batch = 0

    def state_dict(self) -> FeedPosition:
        return {"epoch": self.epoch, "batch": self.batch, "seed": self.seed, "data": self.fingerprint}

    def load_state_dict(self, state: FeedPosition) -> None:
        if state["data"] != self.fingerprint:
            raise UserError(self._changed_data)
        if state["seed"] != self.seed:
            raise UserError(f"this run was started with seed {state['seed']}, but the seed is {self.seed}")
        self.epoch = state["epoch"]
        self.batch = state["batch"]
        if self.batch >= self.batches:
            raise UserError(f"the saved position is batch {self.batch} of an epoch of {self.batches}")


@final
class Sampler(SeededFeed):
    """Iterates over reshuffled epochs of a data set."""

    _changed_data = (
        "the data differs from what this run was trained on (in its text, tokenizer, lengths or batch size); restore "
        "the previous data, or start a new run"
    )

    def __init__(self, plan: EpochPlan, seed: int, share: ProcessShare | None = None) -> None:
        super().__init__(seed, plan.fingerprint)
        self._plan = plan
        self._share = share or ProcessShare()
        self._cached_epoch: Epoch | None = None
        self._epoch_length = 0

    @property
    def batches(self) -> int:
        self._current_epoch()
        return self._epoch_length

    @property
    def rows_continue(self) -> bool:
        return self._current_epoch().rows_continue

    @property
    def reads_ahead(self) -> bool:
        return True

    def __next__(self) -> Batch:
        epoch = self._current_epoch()
        batch = read_batch(epoch, self.batch, self._share)
        self.batch += 1
        if self.batch == self._epoch_length:
            self.epoch += 1
            self.batch = 0
            self._cached_epoch = None
        return batch

    def shard(self, rank: int, world_size: int) -> "Sampler":
        # from the same position, so that a run goes on with any number of processes
        assert 0 <= rank < world_size
        sampler = Sampler(self._plan, self.seed, ProcessShare(rank, world_size))
        sampler.epoch = self.epoch
        sampler.batch = self.batch
        return sampler

    def load_state_dict(self, state: FeedPosition) -> None:
        self._cached_epoch = None
        # it looks at `batches`, from now on those of the saved epoch
        super().load_state_dict(state)

    def _current_epoch(self) -> Epoch:
        if self._cached_epoch is None:
            # planned once: a plan may shuffle millions of rows
            self._cached_epoch = self._plan.epoch(self.seed, self.epoch)
            self._epoch_length = len(self._cached_epoch)
        return self._cached_epoch
