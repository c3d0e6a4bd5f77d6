"""Batches as a training step takes them: counted on the host, and on their way to the device."""

from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from manyformer.batches import Batch, to_device
from manyformer.core import tree_map
from manyformer.system.devices import device_kind


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
