"""How operations on a CPU stay in its caches: elements that they take at once, and memory that calls reuse."""

import torch
from torch import Tensor

from manyformer.nn.runtime.device_reads import is_readable

BLOCK_ELEMENTS = 96 << 10
"""Elements of a tensor, for each thread of a CPU, that several operations read in turn before the next ones."""


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


def block_elements(x: Tensor) -> int:
    """The elements of a block of x: all of it where launching an operation costs more than reading x again."""
    if is_readable(x):
        return BLOCK_ELEMENTS * torch.get_num_threads()
    return max(1, x.numel())
