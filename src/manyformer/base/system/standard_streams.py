"""Standard input and output as a shell may leave them: closed, unable to show some characters, full, or unread."""

import os
import sys
from contextlib import suppress
from typing import TextIO


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
