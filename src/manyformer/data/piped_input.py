"""Data that can be read only once, from standard input or a named pipe: copied to a file, or read line by line."""

import codecs
import filecmp
import io
import os
import select
import shutil
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from manyformer.data.text_files import (
    CHUNK_BYTES,
    HEAD_BYTES,
    MAX_LINE_CHARACTERS,
    decode_text,
    existing_path,
    unpacked,
    without_line_end,
)
from manyformer.errors import UserError
from manyformer.files.atomic_files import atomic_write, report_not_written

STDIN = "-"
WRITER_SECONDS = 10.0
"""So long may the program that writes into a pipe take to open it, such as the command in `<(command)` of a shell."""
_NO_INPUT = "- means standard input, but nothing is piped in; use for instance `cat FILE | manyformer ...`"


def data_path(path: str, cache: Path) -> Path:
    """The file or folder at `path`; what can be read only once, standard input or a pipe, is copied into `cache`.

    Raises UserError if there is no such file, for devices, and for a pipe into which nothing writes."""
    if path == STDIN:
        return save_stdin(cache / "stdin.txt")
    if not Path(path).is_fifo():
        return existing_path(path)
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as pipe:
        start = _await_writer(pipe.fileno(), path)
        os.set_blocking(pipe.fileno(), True)
        return _save_stream(pipe, cache / f"pipe-{Path(path).name}", f"the pipe {path}", start)


def stdin_lines() -> Iterator[str]:
    """The lines of standard input as they arrive, unpacked if they are gzipped; they end as those of files do.

    Raises UserError if there is no input, for a line that is not UTF-8, and for one that is too long.
    """
    head = b""
    number = 0
    with unpacked(_open_stdin(), "standard input") as file:
        while line := file.readline(MAX_LINE_CHARACTERS):
            head = head or line[:HEAD_BYTES]
            number = number + 1
            location = f"standard input, line {number}"
            if len(line) == MAX_LINE_CHARACTERS:
                raise UserError(f"{location}: this line has {MAX_LINE_CHARACTERS:,} bytes or more")
            # a byte order mark is one at the beginning alone, as in files
            mark = ""
            if number > 1 and line.startswith(codecs.BOM_UTF8):
                mark = "\ufeff"
            yield mark + without_line_end(decode_text(line, location, "FILE", head))
    if not number:
        raise UserError(_NO_INPUT)


def save_stdin(copy: Path) -> Path:
    """Copy standard input to the file `copy`, since it can be read only once; without input, reuse an earlier copy.

    Raises UserError if there is neither input nor a copy, and if the input differs from an existing copy.
    """
    return _save_stream(_open_stdin(), copy, "standard input")


def _save_stream(stream: BinaryIO, copy: Path, name: str, start: bytes = b"") -> Path:
    """Copy the bytes `start` and the rest of the stream to the file `copy`."""
    draft = copy.with_name(f"{copy.name}.{os.getpid()}.new")
    with atomic_write(draft) as file:
        file.write(start)
        shutil.copyfileobj(stream, file, CHUNK_BYTES)
    try:
        if draft.stat().st_size and copy.exists() and not filecmp.cmp(draft, copy, shallow=False):
            raise UserError(
                f"{name} differs from the text that this run started with (saved in {copy}); start a new run"
            )
        if not draft.stat().st_size and not copy.exists():
            raise UserError(_NO_INPUT if name == "standard input" else f"{name} is empty")
        if not copy.exists():
            with report_not_written(copy):
                draft.replace(copy)
    finally:
        draft.unlink(missing_ok=True)
    return copy


def _await_writer(pipe: int, path: str) -> bytes:
    """Wait until a program has opened the pipe for writing; the bytes that were read meanwhile, mostly none.

    Raises UserError if none does: a plain `open` of such a pipe, and reading it, would never return."""
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    end = time.monotonic() + WRITER_SECONDS
    while time.monotonic() < end:
        # there is something to read, or who wrote it has closed the pipe again
        if poll.poll(50):
            return b""
        try:
            if start := os.read(pipe, CHUNK_BYTES):
                return start
        except BlockingIOError:
            # it is open for writing, and nothing has come yet: from here on reading waits as for standard input
            return b""
    raise UserError(f"{path}: no program writes into this pipe; start the one that does, or give a file")


def _open_stdin() -> io.BufferedReader:
    """Standard input; an empty one where nothing is piped in. Raises UserError for a device without an end."""
    if sys.stdin is None or sys.stdin.isatty():
        return io.BufferedReader(io.BytesIO())
    stdin = sys.stdin.buffer
    if not isinstance(stdin, io.BufferedReader):
        # an object that a program has put in its place
        return io.BufferedReader(io.BytesIO(stdin.read()))
    status = os.fstat(stdin.fileno())
    if stat.S_ISCHR(status.st_mode) and status.st_rdev != os.stat(os.devnull).st_rdev:
        raise UserError("standard input is a device, which has no end; pipe in a file: `cat FILE | manyformer ...`")
    return stdin
