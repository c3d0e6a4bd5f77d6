"""Ctrl-C and SIGTERM as a wish that the loop looks at between steps."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from manyformer.errors import UserError


class TrainingInterrupted(UserError):
    """The run was asked to stop, has saved, and can be gone on with; the command line ends with 130."""


class StopSignal:
    """Whether somebody asked to stop."""

    def __init__(self) -> None:
        self.name: str | None = None

    def __bool__(self) -> bool:
        return self.name is not None


@contextmanager
def listening(*, patient: bool = False) -> Iterator[StopSignal]:
    """While the block runs the first Ctrl-C or SIGTERM becomes a wish; a second Ctrl-C stops at once unless `patient`.

    Outside the main thread, where Python allows no handlers, nobody can ask.
    """
    wish = StopSignal()

    def ask(number: int, frame: FrameType | None) -> None:
        if wish and number == signal.SIGINT and not patient:
            raise KeyboardInterrupt
        wish.name = signal.Signals(number).name

    if threading.current_thread() is not threading.main_thread():
        yield wish
        return
    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield wish
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
