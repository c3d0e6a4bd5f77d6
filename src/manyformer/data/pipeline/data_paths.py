"""What the paths of a run's settings may be: files, folders, data sets, corpora, and what can be read only once.

All are looked at before anything is prepared. Standard input and pipes are copied to a file, or read line by line."""

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

from manyformer.base.errors import UserError, UserErrors
from manyformer.base.files.atomic_files import atomic_write, report_not_written
from manyformer.config import DataSection
from manyformer.data.pipeline.splits import path_list
from manyformer.data.text.text_files import (
    CHUNK_BYTES,
    HEAD_BYTES,
    MAX_LINE_CHARACTERS,
    decode_text,
    existing_path,
    unpacked,
    without_line_end,
)

STDIN = "-"
STDLIB = "stdlib"
"""The path that means the source of Python's standard library."""
NORMALIZATION_CORPUS = "normalization"
HUB_PREFIX = "hf:"
MINARI_PREFIX = "minari:"
GENERATED_PREFIX = "generated:"
WRITER_SECONDS = 10.0
"""So long may the program that writes into a pipe take to open it, such as the command in `<(command)` of a shell."""
_SETTINGS = ("path", "valid", "test")
_NO_INPUT = "- means standard input, but nothing is piped in; use for instance `cat FILE | manyformer ...`"


def check_paths(data: DataSection) -> None:
    """Raise UserErrors with all paths that lead nowhere, each with its setting."""
    problems = []
    # all problems at once, so that one run of the command names every wrong path
    for setting, path in _named(data):
        if path == STDLIB or not is_plain_path(path):
            continue
        try:
            existing_path(path)
        except UserError as error:
            problems.append(f"{error} (data.{setting})")
    if problems:
        raise UserErrors(problems)


def named_paths(data: DataSection) -> list[str]:
    """All paths of data in the settings, each once."""
    return list(dict.fromkeys(path for _, path in _named(data)))


def _named(data: DataSection) -> Iterator[tuple[str, str]]:
    """Each setting of paths with each of its paths."""
    for setting in _SETTINGS:
        value = getattr(data, setting, None)
        if isinstance(value, str | list | tuple):
            yield from ((setting, path) for path in path_list(value))


def is_plain_path(path: str) -> bool:
    """Whether this is a file, a folder or our standard text: not generated, downloaded, or readable only once."""
    is_special = path in (STDIN, NORMALIZATION_CORPUS) or path.startswith((MINARI_PREFIX, GENERATED_PREFIX))
    return not (is_special or is_hub_dataset(path) or Path(path).is_fifo())


def is_hub_dataset(path: str) -> bool:
    """Whether the path is a Hugging Face data set: a name with `hf:`, or a folder written by `save_to_disk`."""
    return path.startswith(HUB_PREFIX) or is_saved_to_disk(Path(path))


def is_saved_to_disk(folder: Path) -> bool:
    """Whether a folder holds a data set that the `datasets` library has written there."""
    return (folder / "state.json").exists() or (folder / "dataset_dict.json").exists()


def files_at(path: str) -> Iterator[Path]:
    """The file at a path, or all files below it."""
    root = Path(path).expanduser()
    if root.is_file():
        yield root
    for folder, _, names in os.walk(root):
        yield from (file for name in names if (file := Path(folder, name)).is_file())


def data_path(path: str, cache: Path) -> Path:
    """The file or folder at `path`; what can be read only once, standard input or a pipe, is copied into `cache`.

    Raises UserError if there is no such file, for devices, and for a pipe into which nothing writes."""
    if path == STDIN:
        return save_stdin(cache / "stdin.txt")
    if not Path(path).is_fifo():
        return existing_path(path)
    # a plain open would wait forever for a program that writes
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as pipe:
        start = _await_writer(pipe.fileno(), path)
        # from here on reading waits for the writer, as from standard input
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
    # nothing was read: an interactive terminal counts as no input
    if not number:
        raise UserError(_NO_INPUT)


def save_stdin(copy: Path) -> Path:
    """Copy standard input to the file `copy`, since it can be read only once; without input, reuse an earlier copy.

    Raises UserError if there is neither input nor a copy, and if the input differs from an existing copy.
    """
    return _save_stream(_open_stdin(), copy, "standard input")


def _save_stream(stream: BinaryIO, copy: Path, name: str, start: bytes = b"") -> Path:
    """Copy the bytes `start` and the rest of the stream to the file `copy`."""
    # a draft of this process: another one may copy the same input into the same cache
    draft = copy.with_name(f"{copy.name}.{os.getpid()}.new")
    with atomic_write(draft) as file:
        file.write(start)
        shutil.copyfileobj(stream, file, CHUNK_BYTES)
    try:
        # a run that is resumed gets the same input again, or none
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
    # reading a terminal would wait for somebody to type
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
