"""Recording and replay of discrete choices (hashes, routes, random permutations) for layers that are recomputed.

A reversible stack computes each branch a second time, from a reconstruction that differs in the last bits. Continuous
operations tolerate that; a discrete choice would occasionally differ, and the gradient would be that of another
function. Such choices are therefore made inside `choose_once`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch.utils.checkpoint import checkpoint

from manyformer.nn.runtime.handwritten_gradient import needs_plain_operations

T = TypeVar("T")

ChoiceTape = list[Any]
"""The choices of one computation, in order."""

_recording: ContextVar[ChoiceTape | None] = ContextVar("recording", default=None)
_replaying: ContextVar[Iterator[Any] | None] = ContextVar("replaying", default=None)

_open_tapes: list[ChoiceTape] = []
"""The tapes in use in all threads; until torch 2.11 compilers can read this, but no context variable."""


def choose_once(choose: Callable[[], T]) -> T:
    """The result of `choose()`, or the result of the first computation while that is replayed.

    Side effects that must happen once per computation, such as updating a moving average, belong into `choose` too.
    """
    if not _open_tapes:
        return choose()
    replaying = _replaying.get()
    if replaying is not None:
        # choices are made in the same order in both computations
        replayed: T = next(replaying)
        return replayed
    choice = choose()
    tape = _recording.get()
    if tape is not None:
        tape.append(choice)
    return choice


def recompute_for_gradient(compute: Callable[..., T], *inputs: Any, dropout: float) -> T:
    """`compute(*inputs)`, computed again for the gradient; with `dropout` from the same random numbers."""
    if not torch.is_grad_enabled() or needs_plain_operations():
        return compute(*inputs)
    result: T = checkpoint(compute, *inputs, use_reentrant=False, preserve_rng_state=dropout > 0)
    return result


@contextmanager
def recording_choices(tape: ChoiceTape) -> Iterator[None]:
    """Append every choice made inside the block to `tape`."""
    with _opened(_recording, tape, tape):
        yield


@contextmanager
def replaying_choices(tape: ChoiceTape) -> Iterator[None]:
    """Return the choices of `tape`, in order, from `choose_once` inside the block."""
    with _opened(_replaying, iter(tape), tape):
        yield


@contextmanager
def _opened(variable: ContextVar[T | None], value: T, tape: ChoiceTape) -> Iterator[None]:
    """Set a variable of this thread in the block, and let all threads know that there is a tape."""
    token = variable.set(value)
    # any tape of any thread: this only decides whether context variables are looked at
    _open_tapes.append(tape)
    try:
        yield
    finally:
        _open_tapes.pop()
        variable.reset(token)
