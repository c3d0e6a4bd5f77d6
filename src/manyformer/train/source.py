"""What training asks of data; `manyformer.data.open_data` gives it, and so may anybody else."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, Self

from manyformer.batches import Batch


class Units(Protocol):
    """What is behind the targets of some data."""

    @property
    def targets(self) -> int: ...
    @property
    def bytes(self) -> int: ...


class Span(Protocol):
    """The longest sequence of a split."""

    @property
    def length(self) -> int: ...


class Held(Protocol):
    """Validation data: the same batches at every pass."""

    @property
    def units(self) -> Units | None: ...
    def __iter__(self) -> Iterator[Batch]: ...
    def shard(self, rank: int, world: int) -> Iterable[Batch]: ...


class Feed(Protocol):
    """Training batches for ever, and a position in them: `epoch` finished ones, `batch` of `batches` of the present."""

    epoch: int
    batch: int

    @property
    def batches(self) -> int: ...
    def __next__(self) -> Batch: ...
    def shard(self, rank: int, world: int) -> Self: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Source(Protocol):
    """Training and validation data, the model keywords that they decide, and lines for people about them."""

    @property
    def train(self) -> Feed: ...
    @property
    def valid(self) -> Held: ...
    @property
    def needs(self) -> dict[str, Any]: ...
    def describe(self) -> Sequence[str]: ...
    @property
    def spans(self) -> Sequence[Span]: ...
    def check_length(self, longest: int | None) -> None: ...
    def save(self, folder: Path) -> None: ...
