"""Shapes are checked in every call of a test run, each combination that a function meets once."""

from collections.abc import Callable, Hashable
from typing import Any

from beartype import beartype
from torch import Tensor

PLAIN = (str, int, float, bool, type(None))


def once(function: Callable[..., Any]) -> Callable[..., None]:
    """`beartype`, but values of the same types and shapes are not looked at again: most tests take half as long."""
    checked = beartype(function)
    known: set[Hashable] = set()

    def check(*args: object, **kwargs: object) -> None:
        seen = _like(args), _like(kwargs)
        try:
            if seen in known:
                return
        except TypeError:
            # sizes without numbers, while torch writes a graph down
            checked(*args, **kwargs)
            return
        checked(*args, **kwargs)
        known.add(seen)

    return check


def _like(value: object) -> Hashable:
    """Equal for values that an annotation cannot tell apart."""
    if isinstance(value, Tensor):
        return type(value), value.dtype, value.shape
    if isinstance(value, PLAIN):
        return type(value), value
    if type(value) in (tuple, list):
        return type(value), tuple(map(_like, value))  # type: ignore[call-overload]
    if type(value) is dict:
        return dict, tuple((_like(key), _like(one)) for key, one in value.items())
    return type(value)
