"""Choices that must be the same when a layer is computed again: hashes, routes, random permutations.

A reversible stack computes each branch a second time, from a reconstruction that differs in the last bits. What is
continuous does not mind; a discrete choice would now and then fall the other way, and the gradient would be that of
another function. Such a choice is made in `choose_once`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

T = TypeVar("T")

ChoiceTape = list[Any]
"""The choices of one computation, in order."""

_recording: ContextVar[ChoiceTape | None] = ContextVar("recording", default=None)
_replaying: ContextVar[Iterator[Any] | None] = ContextVar("replaying", default=None)


def choose_once(choose: Callable[[], T]) -> T:
    """What `choose` gives; where the computation is repeated, what it gave the first time.

    So it is also the place for what may happen only once, such as moving an average.
    """
    replaying = _replaying.get()
    if replaying is not None:
        found: T = next(replaying)
        return found
    made = choose()
    recording = _recording.get()
    if recording is not None:
        recording.append(made)
    return made


@contextmanager
def recording_choices(tape: ChoiceTape) -> Iterator[None]:
    """Inside, the choices are kept on the tape."""
    token = _recording.set(tape)
    try:
        yield
    finally:
        _recording.reset(token)


@contextmanager
def replaying_choices(tape: ChoiceTape) -> Iterator[None]:
    """Inside, the choices of the tape are made again, in their order."""
    token = _replaying.set(iter(tape))
    try:
        yield
    finally:
        _replaying.reset(token)
