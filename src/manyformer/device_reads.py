"""What the host may learn from tensors: on a CPU all of it, on a GPU nothing without waiting.

A GPU works through a queue. Where Python reads a number of a tensor, it has to wait until the queue is empty, and the
GPU then waits for Python. Code that chooses by values therefore has a second form that computes the choice as tensors.
"""

import torch
from jaxtyping import Bool, Int
from torch import Tensor


def reads_are_free(x: Tensor) -> bool:
    """Whether Python may branch on values of `x` without waiting: on a CPU, and where shapes alone are computed."""
    return x.device.type in ("cpu", "meta")


def is_readable(x: Tensor) -> bool:
    """Whether reading numbers of `x` is possible and free: on a CPU, outside a graph that is being compiled."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def places_of(mask: Bool[Tensor, " n"], count: int | None) -> Int[Tensor, " m"]:
    """Where the mask is set, in order. Without the `count` of these places a device would have to be waited for."""
    if count is None or reads_are_free(mask):
        return mask.nonzero()[:, 0]
    return (~mask).to(torch.uint8).argsort(stable=True)[:count]


def count_values(values: Int[Tensor, "*n"], size: int) -> Int[Tensor, " size"]:
    """How often each of the numbers below `size` occurs: `torch.bincount`, which on a GPU reads the largest value."""
    flat = values.flatten()
    return torch.zeros(size, dtype=torch.long, device=flat.device).scatter_add_(0, flat, torch.ones_like(flat))
