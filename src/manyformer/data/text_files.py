"""Files as text, streamed: plain or gzipped, strict UTF-8, and a sentence for each way in which they can be bad."""

import codecs
import difflib
import filecmp
import gzip
import os
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

from manyformer.data.atomic_files import atomic_write
from manyformer.errors import UserError

CHUNK = 1 << 20
STDIN = "-"
_GZIP = b"\x1f\x8b"
_NAMES = (
    "txt text md rst tex org html xml json jsonl ndjson csv tsv yaml toml py pyi c h cc cpp hpp cs java js ts go rs rb "
    "pl php sh sql swift kt scala hs ml lisp scm el lua jl r m css"
)
# What a folder is searched for; each also gzipped.
ENDINGS = tuple(f".{name}" for name in _NAMES.split())


class NumberedLine(NamedTuple):
    """A line without its end, and its number counted from 1."""

    number: int
    text: str


def existing_path(path: str | os.PathLike[str]) -> Path:
    """The path, or a UserError with the nearest name in its folder."""
    place = Path(path).expanduser()
    if place.exists():
        return place
    folder = place.parent
    if not folder.is_dir():
        raise UserError(f"{place}: there is no such file (nor a folder {folder})")
    near = difflib.get_close_matches(place.name, [one.name for one in folder.iterdir()], n=1, cutoff=0.6)
    raise UserError(f"{place}: there is no such file" + (f"; did you mean {folder / near[0]}?" if near else ""))


def kind_of(path: Path) -> str:
    """The ending that tells what is inside, gzip looked through: ".txt", ".jsonl", ..."""
    return Path(path.stem).suffix.lower() if path.suffix.lower() == ".gz" else path.suffix.lower()


def folder_files(folder: Path) -> list[Path]:
    """The text files under a folder, in order of their names; hidden ones and other endings than ENDINGS left out."""
    found = []
    for place, inside, names in os.walk(folder):
        inside[:] = sorted(name for name in inside if not name.startswith(".") and name != "__pycache__")
        paths = (Path(place, name) for name in names if not name.startswith("."))
        found += [path for path in paths if kind_of(path) in ENDINGS and path.is_file()]
    if not found:
        raise UserError(f"{folder}: this folder holds no text files (looked for {' '.join(ENDINGS)}, each also .gz)")
    return sorted(found, key=lambda path: path.relative_to(folder).parts)


def keep_stdin(copy: Path) -> Path:
    """Standard input, copied to a file since it can be read only once; an earlier copy serves where nothing comes.

    Raises UserError where nothing comes and no copy is there, and where the copy is of something else.
    """
    silent = sys.stdin is None or sys.stdin.isatty()
    fresh = copy.with_name(f"{copy.name}.{os.getpid()}.new")
    with atomic_write(fresh) as file:
        while not silent and (part := sys.stdin.buffer.read(CHUNK)):
            file.write(part)
    try:
        if fresh.stat().st_size and copy.exists() and not filecmp.cmp(fresh, copy, shallow=False):
            raise UserError(f"what is piped in differs from what this run began with (kept in {copy}); start a new run")
        if not fresh.stat().st_size and not copy.exists():
            raise UserError(
                "- means standard input, but nothing is piped in; use for instance `cat FILE | manyformer ...`"
            )
        if not copy.exists():
            fresh.replace(copy)
    finally:
        fresh.unlink(missing_ok=True)
    return copy


@contextmanager
def open_bytes(path: Path) -> Iterator[BinaryIO]:
    """The bytes of a file, unpacked where it is gzipped (told by its first bytes, not by its name)."""
    if path.is_dir():
        raise UserError(f"{path}: this is a folder, and a file is needed here")
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
        raise UserError(f"{path}: this file may not be read (permission denied)") from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f"{path}: this gzip file is damaged or not whole ({error})") from error


def chunks(path: Path, size: int = CHUNK) -> Iterator[str]:
    """The text in parts of about `size` bytes, line ends as they are, a byte order mark left out."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    done, fresh = 0, True
    with open_bytes(path) as file:
        while True:
            part = file.read(size)
            held = len(decoder.getstate()[0])
            try:
                text = decoder.decode(part, final=not part)
            except UnicodeDecodeError as error:
                where = done - held + error.start
                byte = error.object[error.start]
                raise UserError(
                    f"{path}: not UTF-8 at byte {where} (0x{byte:02x}); convert it, for instance "
                    f"`iconv -f latin1 -t utf-8 {path.name}`"
                ) from None
            done += len(part)
            if text and fresh:
                text, fresh = text.removeprefix("\ufeff"), False
            if text:
                yield text
            if not part:
                return


def lines(path: Path) -> Iterator[NumberedLine]:
    """The lines, ended by newline alone (a carriage return before it is left out), not by other separators."""
    rest: list[str] = []
    number = 0
    for text in chunks(path):
        first, *others = text.split("\n")
        rest.append(first)
        for start in others:
            number += 1
            yield NumberedLine(number, "".join(rest).removesuffix("\r"))
            rest = [start]
    last = "".join(rest)
    if last:
        yield NumberedLine(number + 1, last)
