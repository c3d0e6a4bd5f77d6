"""Training batches that a thread reads, prepares and copies to the device while earlier ones are trained on."""

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Generic, NamedTuple, TypeVar, final

import torch
from torch import Tensor

from manyformer.base.errors import UserError
from manyformer.data.batching.epochs import FeedPosition, TrainingFeed
from manyformer.nn.batches import Batch, to_device
from manyformer.nn.core import tree_map
from manyformer.nn.runtime.devices import device_kind

T = TypeVar("T")

DEFAULT_AHEAD = 2
"""How many batches `batch.ahead=auto` reads ahead for an accelerator."""
THREAD_NAME = "batches ahead"


class PreparedBatch(NamedTuple):
    """This process's part of a batch, with its counts, which can be read on the host alone without waiting.

    `copied` is the event on a GPU that ends its copy to the device; None where the tensors are on the host, or where
    the copy was made in order with all else that the device computes."""

    batch: Any
    targets: int
    tokens: int
    copied: Any = None

    def target_count(self) -> int:
        return self.targets

    def token_count(self) -> int:
        return self.tokens

    def ignored(self) -> "PreparedBatch":
        return self._replace(batch=self.batch.ignored(), targets=0)

    def on_device(self, device: torch.device) -> Batch:
        """The batch on `device`; what is computed there from now on waits for its copy, the host does not."""
        if self.copied is None:
            moved: Batch = to_device(self.batch, device)
            return moved
        stream = torch.cuda.current_stream(device)
        stream.wait_event(self.copied)

        def used_here(tensor: Tensor) -> Tensor:
            # its memory was allocated for the stream of copies, which must not reuse it before this stream is done
            tensor.record_stream(stream)
            return tensor

        tree_map(used_here, self.batch)
        arrived: Batch = self.batch
        return arrived


@final
class DeviceCopies:
    """Copies batches to a GPU from any thread, beside what it computes, in a stream of their own.

    Other devices have no such copies: batches stay on the host until their step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # the build of torch tells a GPU from a device that only pretends to be one
        is_built = bool(torch.backends.cuda.is_built())  # type: ignore[no-untyped-call]
        has_streams = device_kind(device).pins_copies and is_built and torch.cuda.is_available()
        self._stream: Any = torch.cuda.Stream(device) if has_streams else None  # type: ignore[no-untyped-call]

    def __call__(self, prepared: PreparedBatch) -> PreparedBatch:
        """The batch with its tensors on their way to the device."""
        if self._stream is None:
            return prepared
        # the current device, which the stream sets as well, belongs to each thread
        with torch.cuda.stream(self._stream):
            moved = to_device(prepared.batch, self._device)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record(self._stream)
        return prepared._replace(batch=moved, copied=copied)


class _Failure:
    """What a call raised, in the place of its result."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


@final
class BackgroundReader(Generic[T]):
    """Calls `read` again and again in a thread of its own, and holds the results until they are taken, in their order.

    At most `ahead` results are held, the one that is being read included, so that memory is bounded. What `read` raises
    ends the thread, and is raised by the `take` that would have had the result. The thread starts with the first
    `take`, and ends at `close`; it is a daemon, so that a process never waits for one that was not closed.
    """

    def __init__(self, read: Callable[[], T], ahead: int, *, name: str) -> None:
        assert ahead >= 1
        self._read = read
        self._ahead = ahead
        self._results: deque[T | _Failure] = deque()
        self._changed = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)

    def take(self) -> T:
        """The next result, for which this waits. Raises what `read` raised in its place, again at every later call."""
        if self._thread.ident is None:
            self._start()
        with self._changed:
            # without a timeout: the thread leaves a result or an error, whatever happens to it
            self._changed.wait_for(lambda: self._results)
            # a failure stays where it is: a later call raises it again
            result = self._results[0]
            if isinstance(result, _Failure):
                raise result.error
            self._results.popleft()
            self._changed.notify_all()
        return result

    def close(self) -> None:
        """End the thread, after the call of `read` that it is in, and drop the results that were not taken."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join()
        self._results.clear()

    def _start(self) -> None:
        try:
            self._thread.start()
        except RuntimeError as error:
            # the limit of processes that the system sets, of which threads are a part
            raise UserError(f"no thread could be started to read ahead ({error}); set batch.ahead=0") from error

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or len(self._results) < self._ahead)
                if self._is_closed:
                    return
            result: T | _Failure
            try:
                result = self._read()
            except BaseException as error:
                result = _Failure(error)
            with self._changed:
                self._results.append(result)
                self._changed.notify_all()
            if isinstance(result, _Failure):
                return
            # the caller alone holds the result from now on
            del result


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
            # a generator may hold files open until it ends
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
            # after `close` the feed is ahead of the batch that was taken last
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
        # the thread has ended, so that nobody else uses the feed
        return AheadFeed(self._feed.shard(rank, world_size), self._ahead, self._prepare)

    def state_dict(self) -> FeedPosition:
        state = self._feed.state_dict()
        state["epoch"] = self.epoch
        state["batch"] = self.batch
        return state

    def load_state_dict(self, state: FeedPosition) -> None:
        self.close()
        self._feed.load_state_dict(state)
        self.epoch = self._feed.epoch
        self.batch = self._feed.batch
        self._batches = None
