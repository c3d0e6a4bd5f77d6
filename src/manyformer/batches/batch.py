"""What all batches are: CPU tensors, one sequence per row; their counts, their layouts, and their way to a device."""

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol, Self, TypeVar, final, runtime_checkable

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from manyformer.core import PADDING_SEGMENT, ContiguousLayout, PackedLayout, tree_map
from manyformer.system.devices import device_kind, send

SegmentLayout = PackedLayout | ContiguousLayout | None

# The target of a position that is not scored: torch's convention for cross-entropy.
IGNORE_INDEX = -100

PLACE_STEPS = 32
"""The number of scored tokens of a batch is rounded up to one of so many numbers."""


@runtime_checkable
class Batch(Protocol):
    """A NamedTuple of tensors with one row per sequence: what data produces and the loss of a model takes.

    Beside segment ids it may have their layout, which what cuts rows or columns must leave out."""

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

    Copies are asynchronous where the device has such, from pinned memory. What only the host can read without waiting
    is in the batch before: the layouts of its rows, and its places.
    """
    if device_kind(device).is_host:
        return batch
    on_host: Any = with_layouts(batch)
    if isinstance(on_host, ListsPlaces):
        on_host = on_host.with_places()
    moved: BatchT = tree_map(lambda tensor: send(tensor, device), on_host)
    return moved


def with_layouts(batch: BatchT) -> BatchT:
    """The batch with the layouts of its segment ids that are on the host, in the fields beside them.

    A field `NAME_layout`, or `layout`, belongs to the segment ids `NAME_segments`, or `segments`."""
    layouts = {}
    for name in getattr(batch, "_fields", ()):
        if name.endswith("layout") and getattr(batch, name) is None:
            segments = getattr(batch, f"{name.removesuffix('layout')}segments")
            if segments is not None and segments.device.type == "cpu":
                layouts[name] = read_segment_layout(segments)
    if not layouts:
        return batch
    replaced: BatchT = batch._replace(**layouts)  # type: ignore[attr-defined]
    return replaced


def segment_layout(segments: Int[Tensor, "b l"], known: SegmentLayout = None) -> SegmentLayout:
    """The layout of these segment ids if it is `known` or can be read, which it cannot where they are on a device.

    A graph that is being compiled knows none: it would be compiled again for the documents of each batch.
    """
    if torch.compiler.is_compiling():
        return None
    if known is not None or segments.device.type != "cpu":
        return known
    return read_segment_layout(segments)


def read_segment_layout(segments: Int[Tensor, "b l"]) -> SegmentLayout:
    """The layout of segment ids on the host; None where a document is in several pieces, which has no simple layout."""
    ids = segments.numpy()
    if ids.shape[1] and not ids.any():
        return ContiguousLayout()
    if not ids.size:
        return PackedLayout((), ())
    is_start = np.ones(ids.shape, dtype=bool)
    np.not_equal(ids[:, 1:], ids[:, :-1], out=is_start[:, 1:])
    rows, starts = is_start.nonzero()
    documents = ids[rows, starts]
    is_same_row = rows[1:] == rows[:-1]
    # a document ends where the next one of its row begins, or with the row
    stops = np.full_like(starts, ids.shape[1])
    stops[:-1][is_same_row] = starts[1:][is_same_row]
    if (documents == PADDING_SEGMENT).any():
        is_document = documents != PADDING_SEGMENT
        rows, starts, stops, documents = (part[is_document] for part in (rows, starts, stops, documents))
        is_same_row = rows[1:] == rows[:-1]
    # ids that ascend, as packing numbers them, do not repeat
    if not (documents[1:] > documents[:-1])[is_same_row].all():
        order = np.lexsort((documents, rows))
        rows_in_order = rows[order]
        documents_in_order = documents[order]
        is_repeated = documents_in_order[1:] == documents_in_order[:-1]
        if (is_repeated & (rows_in_order[1:] == rows_in_order[:-1])).any():
            return None
    return PackedLayout(tuple(zip(rows.tolist(), starts.tolist(), stops.tolist())), tuple(documents.tolist()))


def count_scored(targets: Tensor) -> int:
    """The number of targets that are not ignored."""
    return int((targets != IGNORE_INDEX).sum())


def count_valid(tokens: Tensor, segments: Tensor | None) -> int:
    """The number of tokens that are not padding."""
    if segments is None:
        return tokens.numel()
    return int((segments != PADDING_SEGMENT).sum())


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
