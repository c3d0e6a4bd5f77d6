"""Ctrl-C and SIGTERM: an exception in the main thread at any moment, or a flag for a block that looks between steps."""

import os
import select
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from manyformer.base.errors import TrainingInterrupted
from manyformer.base.system.temporary_folders import remove_temporary_folders

STOPPED = 130
"""The exit code of a process that a signal has stopped."""

GRACE_SECONDS = 1.0
"""How long a watched process may take to end after a signal, for instance where native code does not return."""

_STOP_NUMBERS = (signal.SIGINT, signal.SIGTERM)
_AWAITED = b"\nstopping after this step; a second signal stops at once\n"


class StoppedBySignal(KeyboardInterrupt):
    """Ctrl-C or SIGTERM has arrived; raised in the main thread, so that blocks clean up."""


class StopSignal:
    """True once a signal to stop has arrived: `signal_name`. `is_awaited` says that a block looks for it."""

    def __init__(self) -> None:
        self.signal_name: str | None = None
        self.is_awaited = False

    def __bool__(self) -> bool:
        return self.signal_name is not None

    @contextmanager
    def awaited(self) -> Iterator[None]:
        """A block that looks at this flag between its steps and ends itself: the first signal only sets the flag."""
        self.is_awaited = True
        try:
            yield
        finally:
            self.is_awaited = False


class _StopHandler:
    """The handler of both signals."""

    def __init__(self) -> None:
        self.stop_signal = StopSignal()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        repeated = bool(self.stop_signal)
        self.stop_signal.signal_name = signal.Signals(number).name
        if not self.stop_signal.is_awaited:
            raise StoppedBySignal
        if not repeated:
            # not through sys.stderr, which may be in the middle of a line of this very thread
            os.write(2, _AWAITED)
        elif number == signal.SIGINT and "RANK" not in os.environ:
            raise KeyboardInterrupt


@contextmanager
def handle_stop_signals(*, watched: bool = False) -> Iterator[StopSignal]:
    """Raise StoppedBySignal in the main thread on Ctrl-C or SIGTERM, or set the flag that a block awaits.

    A second Ctrl-C ends that block at once, except in a process of torchrun, which repeats signals. `watched` is for a
    process of ours alone: a thread ends it where it has not ended `GRACE_SECONDS` after a signal, and at the second
    signal. Handlers that are installed already stay. Outside the main thread, where Python allows no handlers, the flag
    is never set.
    """
    current = signal.getsignal(signal.SIGINT)
    # a block within a block: the outer one decides
    if isinstance(current, _StopHandler):
        yield current.stop_signal
        return
    handler = _StopHandler()
    if threading.current_thread() is not threading.main_thread():
        yield handler.stop_signal
        return
    if watched:
        _start_watch(handler.stop_signal)
    previous_handlers = {number: signal.signal(number, handler) for number in _STOP_NUMBERS}
    try:
        yield handler.stop_signal
    finally:
        for number, previous in previous_handlers.items():
            signal.signal(number, previous)


@contextmanager
def resumable() -> Iterator[StopSignal]:
    """A block of work that the same command continues: Ctrl-C and SIGTERM end it with TrainingInterrupted."""
    with handle_stop_signals() as stop_signal:
        try:
            yield stop_signal
        except StoppedBySignal:
            raise TrainingInterrupted("stopped. The same command continues.") from None


def _start_watch(stop_signal: StopSignal) -> None:
    wakeups, written = os.pipe()
    os.set_blocking(written, False)
    # written by the handler in C, so that signals are seen here while native code runs in the main thread
    signal.set_wakeup_fd(written, warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(wakeups, stop_signal), name="stop signals", daemon=True).start()


def _watch(wakeups: int, stop_signal: StopSignal) -> None:
    """End this process at the second signal, or if it still runs `GRACE_SECONDS` after it should have ended."""
    # Python writes the numbers of all signals that it handles
    while os.read(wakeups, 1)[0] not in _STOP_NUMBERS:
        pass
    # a block that awaits the signal may take as long as its step, and then has its grace
    was_awaited = True
    while was_awaited or stop_signal.is_awaited:
        was_awaited = stop_signal.is_awaited
        if select.select([wakeups], [], [], GRACE_SECONDS)[0] and os.read(wakeups, 1)[0] in _STOP_NUMBERS:
            break
    remove_temporary_folders()
    os.write(2, b"\nstopped\n")
    os._exit(STOPPED)
