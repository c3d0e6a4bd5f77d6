"""What the operating system asks of a process: signals, temporary folders, streams as a shell may leave them.

A command that starts imports hundreds of thousands of objects, among which cycles are looked for in vain.

Ctrl-C and SIGTERM are an exception in the main thread at any moment, or a flag for a block that looks between steps.
Temporary folders are removed at their end, and those of killed processes at the next start. Standard input and output
may be closed, unable to show some characters, full, or unread."""

import fcntl
import gc
import os
import select
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TextIO

from manyformer.base.errors import TrainingInterrupted

STOPPED = 130
"""The exit code of a process that a signal has stopped."""

GRACE_SECONDS = 1.0
"""How long a watched process may take to end after a signal, for instance where native code does not return."""

_STARTING_THRESHOLD = 300_000
_USUAL_THRESHOLDS = gc.get_threshold()

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


_PREFIX = ".manyformer-"
_SUFFIX = ".scratch"
_folders: set[Path] = set()


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """A new folder in the system's folder for temporary files, removed when the block ends.

    Folders that killed processes have left are removed as well: each is locked by the process that uses it, and the
    lock belongs to the operating system.
    """
    # a kill leaves a folder without its lock
    for abandoned in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*{_SUFFIX}"):
        _remove_if_unlocked(abandoned)
    folder, handle = _make_locked_folder()
    _folders.add(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        _folders.discard(folder)
        os.close(handle)


def remove_temporary_folders() -> None:
    """Remove the folders of this process, which is about to end without leaving its blocks."""
    for folder in list(_folders):
        shutil.rmtree(folder, ignore_errors=True)


def _make_locked_folder() -> tuple[Path, int]:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, suffix=_SUFFIX))
        # another process that begins may take it for one that was left, and remove it before it is open or locked
        try:
            handle = os.open(folder, os.O_RDONLY)
        except FileNotFoundError:
            continue
        fcntl.flock(handle, fcntl.LOCK_EX)
        if folder.is_dir():
            return folder, handle
        os.close(handle)


def _remove_if_unlocked(folder: Path) -> None:
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:  # removed in the meantime, or of another user
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    except BlockingIOError:
        pass
    finally:
        os.close(handle)


def begin_start() -> None:
    """Look for cycles rarely while a command imports what it needs; `end_start` ends it, as the first model does."""
    gc.set_threshold(_STARTING_THRESHOLD)


def end_start() -> None:
    """Look for cycles as usual from now on, but not among what was imported; without effect outside of a start."""
    if gc.get_threshold()[0] == _STARTING_THRESHOLD:
        gc.freeze()
        gc.set_threshold(*_USUAL_THRESHOLDS)


def prepare_streams() -> None:
    """Open what is closed, to the null device, and escape characters that the output cannot show.

    For the start of a process: a file that is opened later would otherwise get the number of a closed stream, and
    libraries that print would write into it.
    """
    for number, mode in enumerate(("r", "w", "w")):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDONLY if mode == "r" else os.O_WRONLY)
            # the lowest free number, which is that of the closed stream
            assert opened == number
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "r" if number == 0 else "w", encoding="utf-8", closefd=False))
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def shows_all_characters(stream: TextIO) -> bool:
    """Whether the encoding of a stream has every character."""
    return (getattr(stream, "encoding", None) or "utf-8").lower().replace("_", "-").startswith("utf")


def discard(stream: TextIO) -> None:
    """Send what a stream still holds, and all that follows, to the null device: Python's last flush cannot fail."""
    with suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


def flush_or_discard(stream: TextIO) -> None:
    """Write what a stream still holds where that can be done; what prevents it was told before."""
    try:
        stream.flush()
    except OSError:
        discard(stream)
