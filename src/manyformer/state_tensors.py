"""States as flat lists of tensors, to be stored in files that hold tensors only."""

from collections.abc import Iterator

import torch
from torch import Tensor

from manyformer.core import State


def flatten_state(state: State) -> list[Tensor]:
    """The tensors of a state in order, and a last one with its whole numbers."""
    leaves = list(_leaves(state))
    numbers = [int(leaf) for leaf in leaves if isinstance(leaf, int)]
    return [*(leaf for leaf in leaves if isinstance(leaf, Tensor)), torch.tensor(numbers, dtype=torch.long)]


def restore_state(template: State, tensors: list[Tensor]) -> State:
    """The state that `flatten_state` made these tensors of; `template` is one of the same form, such as an initial one.

    Raises ValueError if the number of tensors, their dtypes or their numbers of axes differ from the template's."""
    expected = [(tensor.dtype, tensor.ndim) for tensor in flatten_state(template)]
    if [(tensor.dtype, tensor.ndim) for tensor in tensors] != expected or len(tensors[-1]) != _count_numbers(template):
        raise ValueError("these tensors are not those of a state of this form")
    return _fill(template, iter(tensors), iter(tensors[-1].tolist()))


def _count_numbers(state: State) -> int:
    return sum(isinstance(leaf, int) for leaf in _leaves(state))


def _leaves(state: State) -> Iterator[Tensor | int]:
    if isinstance(state, Tensor | int):
        yield state
    elif isinstance(state, list | tuple):
        for child in state:
            yield from _leaves(child)
    elif state is not None:
        raise TypeError(f"a state has tensors, whole numbers, tuples and lists, not a {type(state).__name__}")


def _fill(template: State, tensors: Iterator[Tensor], numbers: Iterator[int]) -> State:
    if isinstance(template, Tensor):
        return next(tensors)
    if isinstance(template, int):
        return type(template)(next(numbers))
    if isinstance(template, list | tuple):
        children = [_fill(child, tensors, numbers) for child in template]
        return type(template)(*children) if hasattr(template, "_fields") else type(template)(children)
    return None
