"""Ctrl-C and SIGTERM as a stop signal that the training loop checks between steps."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from manyformer.errors import TrainingInterrupted as TrainingInterrupted


class StopSignal:
    """True once a signal to stop has arrived; `signal_name` is that signal."""

    def __init__(self) -> None:
        self.signal_name: str | None = None

    def __bool__(self) -> bool:
        return self.signal_name is not None


@contextmanager
def handle_stop_signals(*, patient: bool = False) -> Iterator[StopSignal]:
    """Turn Ctrl-C and SIGTERM into a stop signal while the block runs; a second Ctrl-C stops at once unless `patient`.

    Outside the main thread, where Python allows no handlers, the signal is never set.
    """
    stop_signal = StopSignal()

    def on_signal(number: int, frame: FrameType | None) -> None:
        if stop_signal and number == signal.SIGINT and not patient:
            raise KeyboardInterrupt
        stop_signal.signal_name = signal.Signals(number).name

    if threading.current_thread() is not threading.main_thread():
        yield stop_signal
        return
    previous_handlers = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop_signal
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)
