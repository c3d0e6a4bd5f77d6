"""Training batches that a thread reads and prepares while earlier ones are trained on."""

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple, final

import torch

from manyformer.batches import Batch
from manyformer.batches.batch import PreparedBatch
from manyformer.data.training_feed import FeedPosition, TrainingFeed
from manyformer.errors import UserError
from manyformer.system.background_reader import BackgroundReader

DEFAULT_AHEAD = 2
"""How many batches `batch.ahead=auto` reads ahead for an accelerator."""
THREAD_NAME = "batches ahead"


def batches_ahead(requested: int | str, feed: TrainingFeed, device: torch.device) -> int:
    """How many batches a run reads ahead of the one that it trains on; 0 for none.

    `auto` means none on a CPU: reading and training would share its cores, and neither would be faster. Raises
    UserError for a number that this feed does not allow."""
    if requested == "auto":
        if device.type != "cpu" and feed.reads_ahead:
            return DEFAULT_AHEAD
        return 0
    count = int(requested)
    if count and not feed.reads_ahead:
        problem = f"batch.ahead is {count}, but this data gives a batch only in its turn"
        raise UserError(f"{problem} (its feed says so: `reads_ahead`); leave it out")
    return count


PrepareBatch = Callable[[Batch], PreparedBatch]
"""Counts a batch and brings it on its way to the device; called in the thread that reads."""

PassReader = Callable[[Iterable[Batch]], AbstractContextManager[Iterator[Batch]]]
"""Begins a pass over batches, which ends with the context."""


def pass_reader(ahead: int, prepare: PrepareBatch) -> PassReader:
    """A reader of passes, such as those over validation data, that reads up to `ahead` batches before their turn."""

    @contextmanager
    def read(batches: Iterable[Batch]) -> Iterator[Iterator[Batch]]:
        unread = iter(batches)
        reader = BackgroundReader(lambda: prepare(next(unread)), ahead, name=THREAD_NAME)
        try:
            yield _taken(reader)
        finally:
            reader.close()
            if isinstance(unread, Generator):
                unread.close()

    return read


def _taken(reader: BackgroundReader[PreparedBatch]) -> Iterator[Batch]:
    """The results of a reader until it has read the last batch."""
    while True:
        try:
            batch = reader.take()
        except StopIteration:
            return
        yield batch


class _ReadBatch(NamedTuple):
    """A batch, and the position of the feed after it."""

    batch: PreparedBatch
    epoch: int
    number: int
    batches: int


@final
class AheadFeed(TrainingFeed):
    """The batches of another feed, which a thread reads and prepares up to `ahead` before they are taken.

    The position is that of the batch taken last, whatever was read after it: a checkpoint resumes from there. `prepare`
    is called in the thread. After `close` nothing is read ahead; the next batch is then read again.
    """

    def __init__(self, feed: TrainingFeed, ahead: int, prepare: PrepareBatch) -> None:
        assert feed.reads_ahead
        self._feed = feed
        self._ahead = ahead
        self._prepare = prepare
        self._reader: BackgroundReader[_ReadBatch] | None = None
        self._batches: int | None = None
        self.epoch = feed.epoch
        self.batch = feed.batch
        self._rows_continue = feed.rows_continue

    @property
    def batches(self) -> int:
        if self._batches is None:
            return self._feed.batches
        return self._batches

    @property
    def rows_continue(self) -> bool:
        return self._rows_continue

    @property
    def reads_ahead(self) -> bool:
        return True

    def __next__(self) -> PreparedBatch:
        if self._reader is None:
            if (self._feed.epoch, self._feed.batch) != (self.epoch, self.batch):
                self._feed.load_state_dict(self.state_dict())
            self._reader = BackgroundReader(self._read, self._ahead, name=THREAD_NAME)
        read = self._reader.take()
        self.epoch = read.epoch
        self.batch = read.number
        self._batches = read.batches
        return read.batch

    def _read(self) -> _ReadBatch:
        """The next batch of the feed; called in the thread, which alone uses the feed as long as it runs."""
        feed = self._feed
        prepared = self._prepare(next(feed))
        return _ReadBatch(prepared, feed.epoch, feed.batch, feed.batches)

    def close(self) -> None:
        """End the thread and forget what it has read ahead."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def shard(self, rank: int, world_size: int) -> "AheadFeed":
        self.close()
        self._feed.load_state_dict(self.state_dict())
        return AheadFeed(self._feed.shard(rank, world_size), self._ahead, self._prepare)

    def state_dict(self) -> FeedPosition:
        state = self._feed.state_dict()
        state["epoch"] = self.epoch
        state["batch"] = self.batch
        return state

    def load_state_dict(self, state: FeedPosition) -> None:
        self.close()
        self._feed.load_state_dict(state)
        self.epoch, self.batch, self._batches = self._feed.epoch, self._feed.batch, None
