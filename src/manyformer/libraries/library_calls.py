"""Calls of libraries that can neither ask the user nor, unless they are told to, reach the network."""

import io
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

OFFLINE_SWITCHES = (("huggingface_hub.constants", "HF_HUB_OFFLINE"), ("datasets.config", "HF_HUB_OFFLINE"))
"""The modules and variables by which the libraries decide, at each request, whether there is a network."""

_STDIN = 0


class RefusedByLibrary(ValueError):
    """What a library raised, in one line."""

    @classmethod
    def of(cls, error: BaseException) -> "RefusedByLibrary":
        """The sentence of another error, cut where it becomes long."""
        return cls(" ".join(str(error).split())[:300])


class _Shared:
    """How many calls in progress are without a network or an input, and what they put back at the end."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.offline_calls = self.silent_calls = 0
        self.switches: list[tuple[Any, str, bool]] = []
        self.stdin: Any = None


_shared = _Shared()


@contextmanager
def library_call(*, online: bool = False) -> Iterator[None]:
    """A block in which a library works: it finds standard input at its end, and a network only if `online`.

    Import the library before: its switches are those of imported modules. Nothing of the environment is changed, and
    all is put back at the end of the block."""
    with ExitStack() as stack:
        stack.enter_context(without_panics())
        stack.enter_context(_without_input())
        if not online:
            stack.enter_context(_without_network())
        yield


@contextmanager
def without_panics() -> Iterator[None]:
    """A block in which panics of libraries in Rust, which no `except Exception` catches, become `RefusedByLibrary`."""
    try:
        yield
    except BaseException as error:
        # the class is in no module from which it could be imported
        if type(error).__name__ != "PanicException":
            raise
        raise RefusedByLibrary.of(error) from None


@contextmanager
def _without_network() -> Iterator[None]:
    with _shared.lock:
        _shared.offline_calls += 1
        done = {module.__name__ for module, _, _ in _shared.switches}
        for name, switch in OFFLINE_SWITCHES:
            module = sys.modules.get(name)
            if module is not None and name not in done:
                _shared.switches.append((module, switch, getattr(module, switch, False)))
                setattr(module, switch, True)
    try:
        yield
    finally:
        with _shared.lock:
            _shared.offline_calls -= 1
            if not _shared.offline_calls:
                for module, switch, value in _shared.switches:
                    setattr(module, switch, value)
                _shared.switches.clear()


@contextmanager
def _without_input() -> Iterator[None]:
    """Python's standard input is empty and, for the main thread, that of the process and its children, too.

    In other threads the process keeps its own: the main thread may be reading it."""
    with _shared.lock:
        if not _shared.silent_calls:
            _shared.stdin = sys.stdin
            sys.stdin = io.TextIOWrapper(io.BytesIO())
        _shared.silent_calls += 1
    saved = None
    if threading.current_thread() is threading.main_thread():
        saved = _replace_descriptor()
    try:
        yield
    finally:
        if saved is not None:
            os.dup2(saved, _STDIN)
            os.close(saved)
        with _shared.lock:
            _shared.silent_calls -= 1
            if not _shared.silent_calls:
                sys.stdin = _shared.stdin
                _shared.stdin = None


def _replace_descriptor() -> int | None:
    """Put the null device in the place of standard input; returns a copy of this, None if it is closed."""
    try:
        saved = os.dup(_STDIN)
    except OSError:
        return None
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, _STDIN)
    os.close(empty)
    return saved
