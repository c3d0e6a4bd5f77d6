"""Recurrences in a fixed number of operations on all tokens at once, for exported graphs of texts of any length.

A loop over tokens has one number of steps in a graph. By doubling (Hillis and Steele 1986, "Data parallel algorithms",
prefix sums) a token has combined what the last 1, 2, 4, ... tokens bring after 0, 1, 2, ... steps, so that few steps
serve all lengths up to a power of two. It is more work than a loop, and elsewhere nothing takes this form.
"""

from collections.abc import Callable

import torch
from torch import Tensor

EXPORTED_LENGTH = 1 << 14
"""The most tokens that exported graphs of any length have recurrences for."""


def scan_any_length(
    combine: Callable[[tuple[Tensor, ...], tuple[Tensor, ...]], tuple[Tensor, ...]],
    steps: tuple[Tensor, ...],
    absent: tuple[float, ...],
    axis: int,
) -> tuple[Tensor, ...]:
    """What the steps along `axis` up to each one are together; `combine` makes one of an earlier and a later one.

    It must be associative, and `absent` are numbers that as an earlier step leave the result of a later one as it is.
    Raises ValueError for more than `EXPORTED_LENGTH` steps."""
    length = steps[0].shape[axis]
    if length > EXPORTED_LENGTH:
        raise ValueError(f"a recurrence of {length} tokens is longer than an exported graph serves: {EXPORTED_LENGTH}")
    column = torch.arange(length, device=steps[0].device)
    shift = 1
    while shift < EXPORTED_LENGTH:
        # by index: the size of a slice would depend on whether the text is longer than the shift
        index = (column - shift).clamp(min=0)
        earlier = tuple(
            step.index_select(axis, index).masked_fill((column < shift).view(_along(axis, step)), number)
            for step, number in zip(steps, absent)
        )
        steps = combine(earlier, steps)
        shift *= 2
    return steps


def _along(axis: int, x: Tensor) -> tuple[int, ...]:
    """The shape of a vector along this axis of `x`."""
    return tuple(-1 if place == axis % x.ndim else 1 for place in range(x.ndim))
