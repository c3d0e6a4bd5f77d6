"""How many elements operations on a CPU take at once, so that what several of them read stays in its caches."""

import torch
from torch import Tensor

BLOCK_ELEMENTS = 96 * 1024
"""The elements of a block, for each thread."""


def block_elements(x: Tensor) -> int:
    """The elements of a block of x: all of it where launching an operation costs more than reading x again."""
    if x.device.type == "cpu" and not torch.compiler.is_compiling():
        return BLOCK_ELEMENTS * torch.get_num_threads()
    return max(1, x.numel())
