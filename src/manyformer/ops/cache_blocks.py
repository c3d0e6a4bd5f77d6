"""How many elements operations on a CPU take at once, so that what several of them read stays in its caches."""

import torch
from torch import Tensor

from manyformer.device_reads import is_readable

BLOCK_ELEMENTS = 96 << 10
"""Elements of a tensor, for each thread of a CPU, that several operations read in turn before the next ones."""


def block_elements(x: Tensor) -> int:
    """The elements of a block of x: all of it where launching an operation costs more than reading x again."""
    if is_readable(x):
        return BLOCK_ELEMENTS * torch.get_num_threads()
    return max(1, x.numel())
