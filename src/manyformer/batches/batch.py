"""The batch records that data loading produces: CPU tensors, one sequence per row, int64 except for images."""

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol, Self, TypeVar, runtime_checkable

import torch
from torch import Tensor

from manyformer.core import PADDING_SEGMENT, tree_map
from manyformer.system.devices import device_kind

# The target of a position that is not scored: torch's convention for cross-entropy.
IGNORE_INDEX = -100


@runtime_checkable
class Batch(Protocol):
    """A NamedTuple of tensors with one row per sequence: what data produces and the loss of a model takes."""

    def __iter__(self) -> Iterator[Any]: ...
    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...

    def target_count(self) -> int:
        """The number of targets that are not ignored: what a training step is normalized by."""

    def token_count(self) -> int:
        """The number of tokens trained on: the targets, or all non-padding tokens if only some have a target."""

    def ignored(self) -> Self:
        """The same rows with every target ignored."""


BatchT = TypeVar("BatchT", bound=Batch)


class TextUnits(NamedTuple):
    """The number of targets of a split, and of the characters and bytes of the text that they encode."""

    targets: int
    characters: int
    bytes: int


def to_device(batch: BatchT, device: torch.device) -> BatchT:
    """Copy the batch's tensors to `device`, asynchronously where possible."""
    kind = device_kind(device)
    if kind.is_host:
        return batch
    if kind.pins_copies:
        batch = tree_map(lambda tensor: tensor.pin_memory(), batch)
    moved: BatchT = tree_map(lambda tensor: tensor.to(device, non_blocking=kind.pins_copies), batch)
    return moved


def count_scored(targets: Tensor) -> int:
    """The number of targets that are not ignored."""
    return int((targets != IGNORE_INDEX).sum())


def count_valid(tokens: Tensor, segments: Tensor | None) -> int:
    """The number of tokens that are not padding."""
    return tokens.numel() if segments is None else int((segments != PADDING_SEGMENT).sum())


def ignore_all(targets: Tensor) -> Tensor:
    """As many targets, each of which is ignored."""
    return torch.full_like(targets, IGNORE_INDEX)
