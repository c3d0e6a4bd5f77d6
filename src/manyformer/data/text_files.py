"""Streaming readers of plain or gzipped text files in strict UTF-8, with an error message for each kind of defect."""

import codecs
import difflib
import filecmp
import gzip
import os
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

from manyformer.errors import UserError
from manyformer.files.atomic_files import atomic_write

CHUNK_BYTES = 1 << 20
STDIN = "-"
_GZIP = b"\x1f\x8b"
_NO_INPUT = "- means standard input, but nothing is piped in; use for instance `cat FILE | manyformer ...`"
_NAMES = (
    "txt text md rst tex org html xml json jsonl ndjson csv tsv yaml toml py pyi c h cc cpp hpp cs java js ts go rs rb "
    "pl php sh sql swift kt scala hs ml lisp scm el lua jl r m css"
)
# Suffixes of the files that are read from a folder; each also with .gz.
TEXT_SUFFIXES = tuple(f".{name}" for name in _NAMES.split())


class NumberedLine(NamedTuple):
    """A line without its line end, and its number counted from 1."""

    number: int
    text: str


def existing_path(path: str | os.PathLike[str]) -> Path:
    """The path with ~ expanded. Raises UserError with the closest name in its folder if it does not exist."""
    expanded = Path(path).expanduser()
    if expanded.exists():
        return expanded
    folder = expanded.parent
    if not folder.is_dir():
        raise UserError(f"{expanded}: there is no such file (nor a folder {folder})")
    matches = difflib.get_close_matches(expanded.name, [sibling.name for sibling in folder.iterdir()], n=1, cutoff=0.6)
    raise UserError(
        f"{expanded}: there is no such file" + (f"; did you mean {folder / matches[0]}?" if matches else "")
    )


def content_suffix(path: Path) -> str:
    """The lower-case suffix that names the content type, without .gz: ".txt", ".jsonl", ..."""
    return Path(path.stem).suffix.lower() if path.suffix.lower() == ".gz" else path.suffix.lower()


def file_stamp(path: Path) -> list[str | int]:
    """The path, size and modification time of a file, which differ after any ordinary change."""
    facts = path.stat()
    return [str(path.resolve()), facts.st_size, facts.st_mtime_ns]


def folder_files(folder: Path) -> list[Path]:
    """The files under a folder with one of `TEXT_SUFFIXES`, sorted by path; hidden files and folders are skipped."""
    files = []
    for directory, subfolders, names in os.walk(folder):
        subfolders[:] = sorted(name for name in subfolders if not name.startswith(".") and name != "__pycache__")
        paths = (Path(directory, name) for name in names if not name.startswith("."))
        files += [path for path in paths if content_suffix(path) in TEXT_SUFFIXES and path.is_file()]
    if not files:
        raise UserError(
            f"{folder}: this folder holds no text files (looked for {' '.join(TEXT_SUFFIXES)}, each also .gz)"
        )
    return sorted(files, key=lambda path: path.relative_to(folder).parts)


def stdin_lines(copy: Path) -> Iterator[str]:
    """The lines of standard input as they arrive; gzipped input is read as a whole, through the file `copy`.

    Raises UserError if there is no input, and for a line that is not UTF-8.
    """
    first_line = b"" if _no_stdin() else sys.stdin.buffer.readline()
    if not first_line:
        raise UserError(_NO_INPUT)
    if first_line.startswith(_GZIP):
        copy.write_bytes(first_line + sys.stdin.buffer.read())
        yield from (line.text for line in read_lines(copy))
        return
    for number, line in enumerate(chain([first_line.removeprefix(codecs.BOM_UTF8)], sys.stdin.buffer), 1):
        try:
            yield line.decode("utf-8").removesuffix("\n").removesuffix("\r")
        except UnicodeDecodeError as error:
            raise UserError(f"standard input, line {number}: this is not UTF-8 ({error.reason})") from None


def save_stdin(copy: Path) -> Path:
    """Copy standard input to the file `copy`, since it can be read only once; without input, reuse an earlier copy.

    Raises UserError if there is neither input nor a copy, and if the input differs from an existing copy.
    """
    no_input = _no_stdin()
    draft = copy.with_name(f"{copy.name}.{os.getpid()}.new")
    with atomic_write(draft) as file:
        while not no_input and (chunk := sys.stdin.buffer.read(CHUNK_BYTES)):
            file.write(chunk)
    try:
        if draft.stat().st_size and copy.exists() and not filecmp.cmp(draft, copy, shallow=False):
            raise UserError(
                f"standard input differs from the text that this run started with (saved in {copy}); start a new run"
            )
        if not draft.stat().st_size and not copy.exists():
            raise UserError(_NO_INPUT)
        if not copy.exists():
            draft.replace(copy)
    finally:
        draft.unlink(missing_ok=True)
    return copy


def _no_stdin() -> bool:
    return sys.stdin is None or sys.stdin.isatty()


@contextmanager
def open_bytes(path: Path) -> Iterator[BinaryIO]:
    """Open a file for reading bytes, decompressed if its first bytes are those of gzip, whatever its name."""
    if path.is_dir():
        raise UserError(f"{path}: this is a folder; give a file")
    try:
        with path.open("rb") as raw:
            packed = raw.read(2) == _GZIP
            raw.seek(0)
            if packed:
                with gzip.GzipFile(fileobj=raw) as unpacked:
                    yield cast(BinaryIO, unpacked)
            else:
                yield raw
    except PermissionError:
        raise UserError(f"{path}: this file cannot be read (permission denied)") from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f"{path}: this gzip file is damaged or incomplete ({error})") from error


def read_chunks(path: Path, size: int = CHUNK_BYTES) -> Iterator[str]:
    """Read the text in chunks of about `size` bytes, with line ends unchanged and without a byte order mark."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    bytes_read, at_start = 0, True
    with open_bytes(path) as file:
        while True:
            chunk = file.read(size)
            pending = len(decoder.getstate()[0])
            try:
                text = decoder.decode(chunk, final=not chunk)
            except UnicodeDecodeError as error:
                position = bytes_read - pending + error.start
                byte = error.object[error.start]
                raise UserError(
                    f"{path}: not UTF-8 at byte {position} (0x{byte:02x}); convert it, for instance "
                    f"`iconv -f latin1 -t utf-8 {path.name}`"
                ) from None
            bytes_read += len(chunk)
            if text and at_start:
                text, at_start = text.removeprefix("\ufeff"), False
            if text:
                yield text
            if not chunk:
                return


def read_lines(path: Path) -> Iterator[NumberedLine]:
    """Read the lines, which end with \\n or \\r\\n; other Unicode line separators do not end a line."""
    pending: list[str] = []
    number = 0
    for text in read_chunks(path):
        head, *line_starts = text.split("\n")
        pending.append(head)
        for line_start in line_starts:
            number += 1
            yield NumberedLine(number, "".join(pending).removesuffix("\r"))
            pending = [line_start]
    remainder = "".join(pending)
    if remainder:
        yield NumberedLine(number + 1, remainder)
