"""The batch records that data loading produces: CPU tensors, one sequence per row, int64 except for images."""

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol, Self, TypeVar, runtime_checkable

import torch
from torch import Tensor

from manyformer.batches.segment_layouts import remember_layout
from manyformer.core import PADDING_SEGMENT, tree_map
from manyformer.system.devices import device_kind

# The target of a position that is not scored: torch's convention for cross-entropy.
IGNORE_INDEX = -100

PLACE_STEPS = 32
"""The number of scored tokens of a batch is rounded up to one of so many numbers."""


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


@runtime_checkable
class ListsPlaces(Protocol):
    """A batch whose model computes with some of its entries, found by their values, such as tokens with a target.

    A GPU that is to find them makes the host wait for their number."""

    def with_places(self) -> Self:
        """The batch with lists of these entries, made on the host."""


class TextUnits(NamedTuple):
    """The number of targets of a split, and of the characters and bytes of the text that they encode."""

    targets: int
    characters: int
    bytes: int


def to_device(batch: BatchT, device: torch.device) -> BatchT:
    """The batch with its tensors on `device`; those that are there already stay as they are.

    Copies are asynchronous where the device has such, from pinned memory. What the host knows about segment ids goes
    with them, so that no layer has to wait for the device to read it there.
    """
    kind = device_kind(device)
    if kind.is_host:
        return batch
    on_host: Any = batch
    if isinstance(on_host, ListsPlaces):
        on_host = on_host.with_places()

    def move(tensor: Tensor) -> Tensor:
        if tensor.device.type == device.type:
            return tensor.to(device)
        return (tensor.pin_memory() if kind.pins_copies else tensor).to(device, non_blocking=kind.pins_copies)

    moved: BatchT = tree_map(move, on_host)
    for name, tensor, on_device in zip(getattr(on_host, "_fields", ()), on_host, moved):
        is_segments = name.endswith("segments") and isinstance(tensor, Tensor) and tensor.ndim == 2
        if is_segments and tensor.device.type == "cpu":
            remember_layout(on_device, tensor)
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


def scored_places(targets: Tensor) -> Tensor:
    """The numbers of the targets that are not ignored, in a flat order, and then of a few that are.

    Their number is rounded up to one of a few, because compiled code is made for each shape."""
    is_ignored = (targets == IGNORE_INDEX).flatten()
    step = max(1, len(is_ignored) // PLACE_STEPS)
    count = -(-(len(is_ignored) - int(is_ignored.sum())) // step) * step
    return is_ignored.to(torch.uint8).argsort(stable=True)[:count]
