"""Reusable memory for temporary tensors."""

import torch
from torch import Tensor


class ScratchBuffer:
    """Named buffers that are reused between calls, because allocating memory costs most."""

    def __init__(self, like: Tensor) -> None:
        self._like = like.new_empty(0)
        self._buffers: dict[str, Tensor] = {}

    def __call__(self, name: str, *shape: int) -> Tensor:
        """An uninitialized view of the buffer `name` with this shape; valid until `name` is requested again."""
        count = torch.Size(shape).numel()
        if name not in self._buffers or len(self._buffers[name]) < count:
            self._buffers[name] = self._like.new_empty(count)
        return self._buffers[name][:count].view(shape)

    def clear(self) -> None:
        """Free all buffers, so that none occupies memory between a forward and a backward pass."""
        self._buffers.clear()
