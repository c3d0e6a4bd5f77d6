"""Batches that a program gives as an object: a loader, a data set, or anything that yields batches.

Random numbers that are drawn while a batch is read follow from the seed and the number of the batch, apart from those
of the training: what is read depends neither on the model nor on interruptions."""

import base64
import hashlib
import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self, final

import numpy as np
import torch
from torch import Tensor

from manyformer.base.errors import UserError
from manyformer.base.files.json_records import FileRecord
from manyformer.base.files.verified_folder import VerifiedFolder
from manyformer.base.type_aliases import LogFn
from manyformer.data.batching.epochs import (
    FIXED_SEED,
    FeedPosition,
    HeldOutBatches,
    ProcessShare,
    TrainingFeed,
    share_of,
)
from manyformer.nn.batches import Batch

MEASURED_ROWS = 64
"""So many rows of a data set are looked at for the size of its batches."""

STATE_FILE = "given_data.json"

ToBatch = Callable[[Any], Batch]
"""Makes the batch of a model of what an object of batches has given."""


class GivenState(FileRecord):
    """Where given data was: its generators at the beginning of the epoch, and a hash of the batch read last."""

    title = "the position in given data"
    generators: tuple[str, ...]
    last_batch: str


@contextmanager
def generators_of(*seeds: int) -> Iterator[None]:
    """A block in which the generators of the process follow from `seeds`, and after which they are as before."""
    python, numpy, host = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    first, second = np.random.SeedSequence(seeds).generate_state(2)
    random.seed(int(first))
    np.random.seed(int(second))
    # the generators of devices, which dropout uses, are left alone
    torch.default_generator.manual_seed(int(first) << 32 | int(second))
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.default_generator.set_state(host)


def hash_of(value: Any) -> str:
    """A hash of the tensors and other values of a batch."""
    digest = hashlib.sha256()

    def add(part: Any) -> None:
        if isinstance(part, Tensor):
            host = part.detach().cpu().contiguous()
            digest.update(f"{host.dtype}{tuple(host.shape)}".encode())
            digest.update(host.flatten().view(torch.uint8).numpy().tobytes())
        elif isinstance(part, np.ndarray):
            digest.update(f"{part.dtype}{part.shape}".encode() + part.tobytes())
        elif isinstance(part, Mapping):
            for name in part:
                digest.update(str(name).encode())
                add(part[name])
        elif isinstance(part, list | tuple):
            for item in part:
                add(item)
        elif isinstance(part, int | float | str | bool | None):
            digest.update(repr(part).encode())

    add(value)
    return digest.hexdigest()[:16]


def is_data_set(data: Any) -> bool:
    """Whether an object gives rows, not batches: a data set of torch or of Hugging Face's `datasets`."""
    names = {f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in type(data).__mro__}
    return isinstance(data, torch.utils.data.Dataset) or bool(names & {"datasets.Dataset", "datasets.IterableDataset"})


def row_length(row: Any) -> int:
    """The tokens of a row: the length of its longest vector of whole numbers, 1 for rows of something else."""
    if isinstance(row, Mapping):
        parts = list(row.values())
    elif isinstance(row, list | tuple) and not all(isinstance(item, int) for item in row):
        parts = list(row)
    else:
        parts = [row]
    lengths = [1]
    for part in parts:
        values = torch.as_tensor(part) if isinstance(part, Tensor | np.ndarray | list | tuple) else None
        if values is not None and values.ndim == 1 and not values.is_floating_point():
            lengths.append(len(values))
    return max(lengths)


@final
class RowBatches:
    """Batches of the rows of a data set, in an order that `seed` and the number of the epoch decide.

    A data set that can only be read in its own order is read in that one."""

    def __init__(self, data: Any, batch_tokens: int, seed: int, *, shuffle: bool) -> None:
        self.data = data.with_format("torch") if hasattr(data, "with_format") else data
        self.is_indexed = hasattr(data, "__getitem__") and isinstance(data, Sized)
        self._seed = seed
        self._shuffle = shuffle
        if self.is_indexed:
            if not len(data):
                raise UserError("data is a data set without rows")
            first_rows = [self.data[index] for index in range(min(len(data), MEASURED_ROWS))]
        else:
            first_rows = list(itertools.islice(iter(self.data), MEASURED_ROWS))
        self.rows = max(1, batch_tokens // max(map(row_length, first_rows), default=1))

    def __len__(self) -> int:
        return -(-len(self.data) // self.rows)

    def batches(self, epoch: int, start: int) -> Iterator[Any]:
        """The batches of an epoch from number `start` on."""
        # a generator of its own: rows draw from those of the process, whatever a loader draws at its start
        options: dict[str, Any] = {"batch_size": self.rows, "generator": torch.Generator()}
        if self.is_indexed:
            order: Any = range(len(self.data))
            if self._shuffle:
                order = np.random.default_rng((self._seed, epoch)).permutation(len(self.data))
            numbers = [int(index) for index in order]
            places = range(start * self.rows, len(numbers), self.rows)
            del options["batch_size"]
            options["batch_sampler"] = [numbers[place : place + self.rows] for place in places]
        loader = torch.utils.data.DataLoader(self.data, **options)
        try:
            yield from itertools.islice(loader, 0 if self.is_indexed else start, None)
        except RuntimeError as error:
            if "stack expects each tensor to be equal size" not in str(error):
                raise
            raise UserError(
                "data has rows of different sizes, which make no batch: give a DataLoader whose collate_fn pads them"
            ) from error


@final
class GivenSource:
    """What a program has given as data, read epoch by epoch from any batch on."""

    def __init__(self, data: Any, batch_tokens: int, seed: int, *, shuffle: bool) -> None:
        self.seed = seed
        self.data = data
        self._rows = RowBatches(data, batch_tokens, seed, shuffle=shuffle) if is_data_set(data) else None
        is_function = callable(data) and not isinstance(data, Iterable)
        if (
            self._rows is None
            and not is_function
            and not isinstance(data, Iterable)
            and not hasattr(data, "__getitem__")
        ):
            raise UserError(
                f"data is a {type(data).__name__}; give a DataLoader, a data set, or any iterable of batches: tensors "
                "of token rows, pairs (input, target), or mappings of what the model's forward takes"
            )
        self._is_function = is_function
        # an iterator is its own iterator: what it has given is gone
        self.is_read_once = isinstance(data, Iterator)
        self._loaders = [data, *(getattr(data, name, None) for name in ("sampler", "batch_sampler", "dataset"))]
        self._loaders.append(getattr(getattr(data, "batch_sampler", None), "sampler", None))
        attributes = [getattr(part, "generator", None) for part in self._loaders]
        generators = [value for value in attributes if isinstance(value, torch.Generator)]
        self.generators = list(dict.fromkeys(generators))

    @property
    def has_rows(self) -> bool:
        """Whether rows are given, which are put into batches here."""
        return self._rows is not None

    @property
    def shares_rows(self) -> bool:
        """Whether each process has batches of its own already."""
        return any(isinstance(part, torch.utils.data.DistributedSampler) for part in self._loaders)

    @property
    def length(self) -> float:
        """The batches of an epoch; infinity where that is not known."""
        counted = self.data if self._rows is None else self._rows
        try:
            return len(counted)
        except TypeError:
            return math.inf

    @property
    def skips_by_reading(self) -> bool:
        """Whether batches are read to pass them."""
        return self._rows is None or not self._rows.is_indexed

    def batches(self, epoch: int, start: int) -> Iterator[Any]:
        """The batches of an epoch from number `start` on."""
        for part in self._loaders:
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)
        iterator: Iterator[Any]
        with generators_of(self.seed, epoch, start if self._rows is not None else 0):
            if self._rows is not None:
                iterator = self._rows.batches(epoch, start)
            else:
                iterator = iter(self.data() if self._is_function else self.data)
        for number in itertools.count(start if self._rows is not None else 0):
            with generators_of(self.seed, epoch, number, 1):
                try:
                    item = next(iterator)
                except StopIteration:
                    return
            if number >= start:
                yield item
            elif number == start - 1:
                self.passed = item

    passed: Any = None
    """The last of the batches that were passed."""

    def describe(self) -> str:
        """The kind of object and its length, for people."""
        count = "batches" if math.isinf(self.length) else f"{self.length:,} batches an epoch"
        if self._rows is not None:
            count += f" of {self._rows.rows:,} rows"
        if self.is_read_once:
            count += ", read once"
        return f"{type(self.data).__name__}, {count}"


@final
class GivenFeed(TrainingFeed):
    """The training batches of a `GivenSource`; a position is reached by reading up to it, unless rows are indexed."""

    def __init__(self, source: GivenSource, to_batch: ToBatch, log: LogFn, share: ProcessShare | None = None) -> None:
        self._source = source
        self._to_batch = to_batch
        self._log = log
        self._share = share or ProcessShare()
        self.epoch = self.batch = 0
        self._iterator: Iterator[Any] | None = None
        self._last: Any = None
        self._saved: GivenState | None = None
        self._generators: tuple[str, ...] = ()

    @property
    def batches(self) -> int:
        # an unknown length never completes an epoch before its end
        return self._source.length  # type: ignore[return-value]

    @property
    def rows_continue(self) -> bool:
        return False

    def __next__(self) -> Batch:
        raw = self._next_raw()
        self._last = raw
        self.batch += 1
        return share_of(self._to_batch(raw), self._share)

    def _next_raw(self) -> Any:
        if self._iterator is None:
            self._begin()
        assert self._iterator is not None
        for raw in self._iterator:
            return raw
        if self._source.is_read_once or not self.batch:
            problem = f"data gave {self.batch:,} batches and has no more, and the run goes on"
            remedy = "give something that can be read again (a list, a DataLoader, a function that gives an iterator)"
            raise UserError(f"{problem}; {remedy}, or set limits.steps to fewer")
        self.epoch += 1
        self.batch = 0
        self._begin()
        return self._next_raw()

    def _begin(self) -> None:
        """Begin to read at the position."""
        source = self._source
        saved = self._saved
        self._saved = None
        if saved is not None:
            for generator, state in zip(source.generators, saved.generators):
                generator.set_state(torch.frombuffer(bytearray(base64.b64decode(state)), dtype=torch.uint8).clone())
        self._generators = tuple(
            base64.b64encode(generator.get_state().numpy().tobytes()).decode() for generator in source.generators
        )
        if self.batch and source.skips_by_reading:
            self._log(f"reading past the first {self.batch:,} batches of data, which this run has been trained on")
        source.passed = None
        self._iterator = source.batches(self.epoch, self.batch)
        if not self.batch or saved is None or not source.skips_by_reading:
            return
        # the batches before the position are read with the first one after it
        following = next(self._iterator, None)
        if source.passed is not None and hash_of(source.passed) != saved.last_batch:
            self._log(
                f"batch {self.batch:,} of data is not the one that this run has read there: the data gives other "
                "batches each time, so that the losses differ from those of an uninterrupted run"
            )
        if following is not None:
            self._iterator = itertools.chain([following], self._iterator)

    def shard(self, rank: int, world_size: int) -> "GivenFeed":
        share = ProcessShare() if self._source.shares_rows else ProcessShare(rank, world_size)
        return GivenFeed(self._source, self._to_batch, self._log, share)

    def state_dict(self) -> FeedPosition:
        return {"epoch": self.epoch, "batch": self.batch, "seed": self._source.seed, "data": "given"}

    def load_state_dict(self, state: FeedPosition) -> None:
        if state["data"] != "given":
            raise UserError("this run was trained on data of its run file, and now data= is given; choose another out")
        if state["seed"] != self._source.seed:
            raise UserError(f"this run was started with seed {state['seed']}, but the seed is {self._source.seed}")
        self.epoch = state["epoch"]
        self.batch = state["batch"]
        self._iterator = None

    def write_files(self, folder: Path) -> None:
        GivenState(generators=self._generators, last_batch=hash_of(self._last)).write(folder / STATE_FILE)

    def read_files(self, files: VerifiedFolder) -> None:
        self._saved = GivenState.read(files.file(STATE_FILE))


@final
class GivenHeldOut(HeldOutBatches):
    """Held-out batches of a `GivenSource`, the same in every pass; None is none."""

    def __init__(self, source: GivenSource | None, to_batch: ToBatch, share: ProcessShare | None = None) -> None:
        self._source = source
        self._to_batch = to_batch
        self._share = share or ProcessShare()
        self.units = None
        self.rows_continue = False
        self._kept: list[Any] | None = None
        if source is not None and (source.is_read_once or math.isinf(source.length)):
            # what cannot be read again, or counted, is kept
            self._kept = list(source.batches(0, 0))

    def __len__(self) -> int:
        if self._kept is not None:
            return len(self._kept)
        return 0 if self._source is None else int(self._source.length)

    def __iter__(self) -> Iterator[Batch]:
        raws: Iterable[Any] = ()
        if self._kept is not None:
            raws = self._kept
        elif self._source is not None:
            raws = self._source.batches(FIXED_SEED, 0)
        for raw in raws:
            yield share_of(self._to_batch(raw), self._share)

    def shard(self, rank: int, world_size: int) -> Self:
        part = type(self)(None, self._to_batch, ProcessShare(rank, world_size))
        part._source = self._source
        part._kept = self._kept
        return part
