"""Streaming readers of plain or gzipped text files in strict UTF-8, with an error message for each kind of defect."""

import codecs
import difflib
import gzip
import hashlib
import os
import re
import shlex
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

from manyformer.base.errors import UserError
from manyformer.base.files.json_records import special_kind
from manyformer.data.storage.content_sums import content_sum, folder_sum

CHUNK_BYTES = 1 << 20
MAX_LINE_CHARACTERS = 1 << 26
"""The longest line that is read."""
HEAD_BYTES = 4096
"""The number of bytes from the beginning of a file that show what it is."""
_GZIP = b"\x1f\x8b"
_NAMES = (
    "txt text md rst tex org html xml json jsonl ndjson csv tsv yaml toml py pyi c h cc cpp hpp cs java js ts go rs rb "
    "pl php sh sql swift kt scala hs ml lisp scm el lua jl r m css"
)
# Suffixes of the files that are read from a folder; each also with .gz.
TEXT_SUFFIXES = tuple(f".{name}" for name in _NAMES.split())
# UTF-32 first: its mark begins with that of UTF-16.
_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_BINARY_FORMATS = (
    (b"PK\x03\x04", "a zip archive or a document in one; extract its text"),
    (b"%PDF", "a PDF document; extract its text"),
    (b"\x89PNG", "a PNG image; data.kind=images reads images"),
    (b"\xff\xd8\xff", "a JPEG image; data.kind=images reads images"),
    (b"BZh", "a bzip2 archive; unpack it with bunzip2"),
    (b"\xfd7zXZ", "an xz archive; unpack it with unxz"),
    (b"\x28\xb5\x2f\xfd", "a zstd archive; unpack it with unzstd"),
    (b"7z\xbc\xaf", "a 7z archive; unpack it"),
    (b"PAR1", "a Parquet file; convert it to JSONL, or load it as a data set of hf:"),
    (b"\x93NUMPY", "a NumPy array; data.kind=images reads images in .npz"),
    (b"SQLite format 3", "a database; export its text"),
)
_MIN_SAMPLE = 16
_CONTROL_CHARACTER = re.compile(rb"[\x00-\x08\x0e-\x1a\x1c-\x1f\x7f]")


class NumberedLine(NamedTuple):
    """A line without its line end, and its number counted from 1."""

    number: int
    text: str


def existing_path(path: str | os.PathLike[str]) -> Path:
    """The path of a file or folder with ~ expanded. Raises UserError with the closest name if there is none."""
    if not str(path):
        raise UserError("the path '' is empty; give a file or a folder")
    try:
        expanded = Path(path).expanduser()
    except RuntimeError:
        raise UserError(
            f"{path}: there is no user of that name; write ./{path} for a file that begins with ~"
        ) from None
    if expanded.is_file() or expanded.is_dir():
        return expanded
    if kind := special_kind(expanded):
        raise UserError(f"{path}: this is {kind}; give a file or a folder, or pipe the data in and give - for it")
    if expanded.is_symlink():
        raise UserError(f"{expanded}: this is a link to {expanded.readlink()}, and there is no file or folder")
    folder = expanded.parent
    if not folder.is_dir():
        raise UserError(f"{expanded}: there is no such file (nor a folder {folder})")
    # a misspelled name is the most frequent mistake, and its correction is beside it
    matches = difflib.get_close_matches(expanded.name, [sibling.name for sibling in folder.iterdir()], n=1, cutoff=0.6)
    raise UserError(
        f"{expanded}: there is no such file" + (f"; did you mean {folder / matches[0]}?" if matches else "")
    )


def content_suffix(path: Path) -> str:
    """The lower-case suffix that names the content type, without .gz: ".txt", ".jsonl", ..."""
    # a gzipped table is read as a table
    if path.suffix.lower() == ".gz":
        return Path(path.stem).suffix.lower()
    return path.suffix.lower()


def file_stamp(path: Path, *, has_sum: bool = True) -> list[str | int]:
    """The path, size and modification time of a file, which differ after any ordinary change, and a sampled sum."""
    facts = path.stat()
    # resolved, so that a relative path names the same file from every folder
    stamp: list[str | int] = [str(path.resolve()), facts.st_size, facts.st_mtime_ns]
    if has_sum:
        return [*stamp, content_sum(path)]
    return stamp


def files_stamp(root: Path, files: list[Path]) -> list[str | int]:
    """The root folder, the number of files, a hash of their names, sizes and modification times, and a sampled sum."""
    hasher = hashlib.sha256()
    for file in files:
        facts = file.stat()
        hasher.update(f"{file.relative_to(root)}\0{facts.st_size}\0{facts.st_mtime_ns}\n".encode())
    return [str(root.resolve()), len(files), hasher.hexdigest(), folder_sum(files)]


def folder_files(folder: Path) -> list[Path]:
    """The files under a folder with one of `TEXT_SUFFIXES`, sorted by path; hidden files and folders are skipped."""
    files = selected_files(folder, lambda path: content_suffix(path) in TEXT_SUFFIXES)
    if not files:
        raise UserError(
            f"{folder}: this folder holds no text files (looked for {' '.join(TEXT_SUFFIXES)}, each also .gz)"
        )
    return files


def selected_files(folder: Path, selects: Callable[[Path], bool]) -> list[Path]:
    """The files under a folder that `selects` accepts by their names, sorted by path; hidden ones are skipped.

    Raises UserError for a pipe, a device or a link to nothing of such a name: it would be missing without a word."""
    return [existing_path(path) for path in _visible_paths(folder) if selects(path)]


def _visible_paths(folder: Path) -> list[Path]:
    """All that is under a folder and neither hidden nor a folder, sorted by path."""
    paths: list[Path] = []
    for directory, subfolders, names in os.walk(folder):
        # in place: `os.walk` does not descend into what is removed
        subfolders[:] = [name for name in subfolders if not name.startswith(".") and name != "__pycache__"]
        paths += [Path(directory, name) for name in names if not name.startswith(".")]
    return sorted(paths, key=lambda path: path.relative_to(folder).parts)


def describe_folder(folder: Path, files: Collection[Path]) -> str:
    """A line about how many files of a folder are read, and which other ones are not."""
    read_files = set(files)
    unread = [path for path in _visible_paths(folder) if path not in read_files]
    read = f"{len(files):,} file{'s' * (len(files) != 1)} read of {folder} ({_list_names(folder, files)})"
    if unread:
        return f"{read}, {len(unread):,} not read ({_list_names(folder, unread)})"
    return f"{read}, all there are"


def _list_names(folder: Path, files: Collection[Path]) -> str:
    names = [str(path.relative_to(folder)) for path in list(files)[:3]]
    return ", ".join([*names, "..."] if len(files) > len(names) else names)


@contextmanager
def open_bytes(path: Path) -> Iterator[BinaryIO]:
    """Open a file for reading bytes, decompressed if its first bytes are those of gzip, whatever its name."""
    if path.is_dir():
        raise UserError(f"{path}: this is a folder; give a file")
    try:
        with path.open("rb") as raw, unpacked(raw, path) as file:
            yield file
    except PermissionError:
        raise UserError(f"{path}: this file cannot be read (permission denied)") from None


@contextmanager
def unpacked(file: BufferedReader, name: object) -> Iterator[BinaryIO]:
    """The file itself, or its content if it is gzipped; in the block, damage is reported with the name."""
    # by content, since a name may say anything; `peek` does not consume the bytes
    if not file.peek(len(_GZIP)).startswith(_GZIP):
        yield file
        return
    try:
        with gzip.GzipFile(fileobj=file) as content:
            yield cast(BinaryIO, content)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f"{name}: this gzip file is damaged or incomplete ({error})") from error


def read_chunks(path: Path, size: int = CHUNK_BYTES) -> Iterator[str]:
    """Read the text in chunks of about `size` bytes, with line ends unchanged and without a byte order mark.

    Raises UserError for bytes that are not UTF-8, and for NUL, which only binary files and other encodings have."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    bytes_read = 0
    at_start = True
    head = b""
    with open_bytes(path) as file:
        while True:
            chunk = file.read(size)
            head = head or chunk[:HEAD_BYTES]
            # bytes of a character that the previous chunk cut off, which the position of an error must not count twice
            pending = len(decoder.getstate()[0])
            # NUL is valid UTF-8, so the decoder would accept a binary file
            if (position := chunk.find(0)) >= 0:
                raise not_text_error(str(path), path.name, head, bytes_read + position, 0)
            try:
                text = decoder.decode(chunk, final=not chunk)
            except UnicodeDecodeError as error:
                position = bytes_read - pending + error.start
                raise not_text_error(str(path), path.name, head, position, error.object[error.start]) from None
            bytes_read += len(chunk)
            if text and at_start:
                # at the start of the file alone: elsewhere it is a character of the text
                text = text.removeprefix("\ufeff")
                at_start = False
            if text:
                yield text
            if not chunk:
                return


class LineBlock(NamedTuple):
    """Lines that follow each other, without their \\n; only the last line of a text may have had none."""

    lines: list[str]
    are_ended: bool


def read_lines(path: Path) -> Iterator[NumberedLine]:
    """Read the lines of a file by the rule of `line_blocks`, without their line ends."""
    number = 0
    for block in line_blocks(read_chunks(path), str(path)):
        for text in block.lines:
            number += 1
            yield NumberedLine(number, text.removesuffix("\r") if block.are_ended else text)


def without_line_end(text: str) -> str:
    """The text without the line end that it may have, by the rule of `line_blocks`."""
    if text.endswith("\n"):
        return text.removesuffix("\n").removesuffix("\r")
    return text


def split_lines(text: str) -> list[str]:
    """The lines of a text by the rule of `line_blocks`, without their line ends."""
    # not `splitlines`, which ends lines at form feeds and other characters, too
    *lines, remainder = text.split("\n")
    ended = [line.removesuffix("\r") for line in lines]
    if remainder:
        return [*ended, remainder]
    return ended


def line_blocks(texts: Iterable[str], name: str) -> Iterator[LineBlock]:
    """Cut the parts of a text into its lines, many at a time; a \\r before the line end is still there.

    This is the rule for every file, pipe and prompt: a line ends with \\n, and a \\r before it belongs to the line end.
    All else is a character of the line: U+2028, U+0085, form feeds, and a \\r that stands alone. What follows the last
    line end is a line if it is not empty. Raises UserError for a line longer than `MAX_LINE_CHARACTERS`.
    """
    pending: list[str] = []
    number = length = 0
    for text in texts:
        lines = text.split("\n")
        pending.append(lines[0])
        # counted while the line grows, so that a file without line ends does not fill the memory
        length += len(lines[0])
        if length > MAX_LINE_CHARACTERS:
            raise UserError(f"{name}:{number + 1}: this line has more than {MAX_LINE_CHARACTERS:,} characters")
        if len(lines) == 1:
            continue
        # parts of a long line are joined once, when it ends: adding each to a text would copy it again and again
        lines[0] = "".join(pending)
        pending = [lines.pop()]
        length = len(pending[0])
        number += len(lines)
        yield LineBlock(lines, are_ended=True)
    remainder = "".join(pending)
    if remainder:
        yield LineBlock([remainder], are_ended=False)


def decode_text(data: bytes, location: str, name: str, head: bytes | None = None) -> str:
    """UTF-8 text without a byte order mark. Raises UserError with the location of other bytes, also of NUL.

    `head` are the first bytes of the file `name`, if `data` is from its middle.
    """
    try:
        # strict: a replacement character would be learned as text
        text = data.decode("utf-8-sig")
        position = data.find(0)
        if position < 0:
            return text
    except UnicodeDecodeError as error:
        position = error.start
    raise not_text_error(location, name, data[:HEAD_BYTES] if head is None else head, position, data[position])


def not_text_error(location: str, name: str, head: bytes, position: int, byte: int) -> UserError:
    """The error for a byte that is not UTF-8, or is NUL, in the file `name` that begins with `head`."""
    if byte:
        problem = f"not UTF-8 at byte {position} (0x{byte:02x})"
    else:
        problem = f"a NUL byte at byte {position}"
    # the file begins as text, so its first bytes would say nothing about the byte
    is_late = not byte and 0 not in head
    if is_late:
        meaning = "text has none: the file is damaged or binary data"
    else:
        meaning = describe_bytes(head, name)
    return UserError(f"{location}: {problem}; {meaning}")


def describe_bytes(head: bytes, name: str) -> str:
    """A guess at the format of the file `name`, which is not UTF-8 text, by its first bytes, with a remedy."""
    for mark, encoding in _MARKS:
        if head.startswith(mark):
            return _conversion(encoding, name)
    for signature, description in _BINARY_FORMATS:
        if head.startswith(signature):
            return f"this is {description}"
    if b"\0" in head:
        # the letters of most scripts have a zero as one of their two bytes
        # of the even and of the odd bytes
        shares = [head[start::2].count(0) / max(1, len(head[start::2])) for start in (0, 1)]
        if len(head) >= _MIN_SAMPLE and max(shares) > 0.4 and min(shares) < 0.1:
            return _conversion("utf-16be" if shares[0] > shares[1] else "utf-16le", name)
        return "this is binary data, not text"
    if _CONTROL_CHARACTER.search(head):
        return "this is binary data or text in an encoding that mixes in control characters, not UTF-8 text"
    return f"if it is text, convert it, for instance `iconv -f latin1 -t utf-8 {_shell_name(name)}`"


def _shell_name(name: str) -> str:
    return shlex.quote(name.removesuffix(".gz"))


def _conversion(encoding: str, name: str) -> str:
    title = encoding[:6].upper()
    return f"it looks like {title}; convert it with `iconv -f {encoding} -t utf-8 {_shell_name(name)}`"
