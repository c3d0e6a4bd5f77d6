"""Protocols of the data that training reads; `manyformer.data.open_data` returns such data."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Self

from manyformer.batches import Batch, TextUnits


class LengthLimitProtocol(Protocol):
    """The length of the longest sequence of a split, in tokens."""

    @property
    def length(self) -> int: ...


class ValidationData(Protocol):
    """Validation batches, the same at every pass.

    `rows_continue` says that row r of each batch continues row r of the previous batch.
    """

    @property
    def units(self) -> TextUnits | None: ...
    @property
    def rows_continue(self) -> bool: ...
    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Batch]: ...
    def shard(self, rank: int, world_size: int) -> Self: ...


class TrainingFeed(Protocol):
    """Endless training batches and a position in them: finished epochs and `batch` of `batches` in the current one.

    `rows_continue` says that row r of each batch continues row r of the previous batch.
    """

    epoch: int
    batch: int

    @property
    def rows_continue(self) -> bool: ...
    @property
    def batches(self) -> int: ...
    def __next__(self) -> Batch: ...
    def shard(self, rank: int, world_size: int) -> Self: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class TrainingDataProtocol(Protocol):
    """Training and validation data, the model keywords that they decide, and a description in lines of text.

    A model must have the `required_keywords`; `offered_keywords` are used by models that have them.
    """

    @property
    def train(self) -> TrainingFeed: ...
    @property
    def valid(self) -> ValidationData: ...
    @property
    def required_keywords(self) -> Mapping[str, Any]: ...
    @property
    def offered_keywords(self) -> Mapping[str, int]: ...
    def describe(self) -> Sequence[str]: ...
    @property
    def length_limits(self) -> Sequence[LengthLimitProtocol]: ...
    def check_length(self, max_length: int | None) -> None: ...
    def save(self, folder: Path) -> None: ...
