"""Rows of files of training and test data, as hashes of their words: text, JSON lines, CSV and arrays of tokens.

Files are read in blocks, and the words of a block are hashed by NumPy at once, so that a gigabyte takes about a minute
and no more memory than a block.
"""

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from manyformer.base.errors import UserError

Hashes = NDArray[np.uint64]
RowNumbers = NDArray[np.int64]
RowKind = Literal["line", "record", "token row", "token stream"]

BLOCK_BYTES = 2**21
BLOCK_ROWS = 20_000
BLOCK_TOKENS = 2**19
LONGEST_LINE = 2**26
MAX_JSON_BYTES = 2**28

RECORD_SUFFIXES = {".jsonl", ".ndjson", ".json", ".csv", ".tsv"}
TOKEN_SUFFIXES = {".npy", ".bin"}
REFUSED_SUFFIXES = {
    ".parquet": "write it as .jsonl or .csv",
    ".arrow": "write it as .jsonl or .csv",
    ".gz": "unpack it",
    ".zst": "unpack it",
    ".xz": "unpack it",
    ".zip": "unpack it",
}
LABEL_NAMES = (
    "label",
    "labels",
    "target",
    "targets",
    "class",
    "category",
    "answer",
    "gold",
    "output",
    "completion",
    "y",
)
TOKEN_HEADER = 20240520
"""The first number of token files with a header of 256 numbers of 32 bits, as of modded-nanogpt."""


class HashedRows(NamedTuple):
    """Words of a few rows: the hash of each, and the number of its row among all of a corpus, in rising order.

    `first` and `stop` bound the numbers of the rows; some may have no words.
    """

    words: Hashes
    rows: RowNumbers
    first: int
    stop: int


class LabeledRow(NamedTuple):
    """A record's input and label as text."""

    row: int
    text: str
    label: str


@dataclass
class DamagedRows:
    """Numbers of rows that cannot be read, with what is wrong: all are counted and some kept."""

    count: int = 0
    examples: list[tuple[int, str]] = field(default_factory=list)

    def add(self, row: int, reason: str, count: int = 1) -> None:
        self.count += count
        if len(self.examples) < 5:
            self.examples.append((row, reason))


class Corpus:
    """The files of a training or test set. Iterating hashes them once; counts are complete after that."""

    def __init__(self, paths: str | Path | Sequence[str | Path]) -> None:
        listed = [paths] if isinstance(paths, str | Path) else list(paths)
        self.files: list[Path] = []
        self.skipped: list[Path] = []
        for path in map(Path, listed):
            self._add(path)
        if not self.files:
            raise UserError(f"{', '.join(map(str, listed))} has no file of text, JSON lines, CSV or tokens")
        kinds = {self.kind_of(file) for file in self.files}
        if kinds & {"token row", "token stream"} and kinds & {"line", "record"}:
            raise UserError(f"{', '.join(map(str, listed))} has both text and arrays of tokens; give one kind")
        self.is_tokens = bool(kinds & {"token row", "token stream"})
        self.starts: list[int] = []
        self.rows = 0
        self.damaged = DamagedRows()
        self.labeled: list[LabeledRow] = []
        self.on_labeled: Any = None
        self.notes: list[str] = []

    @property
    def name(self) -> str:
        if len(self.files) == 1:
            return self.files[0].name
        return f"{len(self.files)} files of {self.files[0].parent.name or '.'}"

    def _add(self, path: Path) -> None:
        if path.is_dir():
            for file in sorted(path.rglob("*")):
                if not file.is_file() or any(part.startswith(".") for part in file.relative_to(path).parts):
                    continue
                if file.suffix in REFUSED_SUFFIXES or (file.suffix not in TOKEN_SUFFIXES and _is_binary(file)):
                    self.skipped.append(file)
                else:
                    self.files.append(file)
            return
        if not path.is_file():
            raise UserError(f"there is no file or folder {path}")
        if path.suffix in REFUSED_SUFFIXES:
            raise UserError(f"{path} is not read: {REFUSED_SUFFIXES[path.suffix]}")
        self.files.append(path)

    def kind_of(self, file: Path) -> RowKind:
        """What a row of a file is."""
        if file.suffix in RECORD_SUFFIXES:
            return "record"
        if file.suffix == ".bin":
            return "token stream"
        if file.suffix == ".npy":
            return "token row" if _load_tokens(file).ndim == 2 else "token stream"
        return "line"

    def place(self, row: int) -> str:
        """Where a row is: the file and the line, record or token."""
        index = int(np.searchsorted(np.array(self.starts), row, side="right")) - 1
        return f"{self.files[index].name}:{row - self.starts[index] + 1}"

    def file_of(self, row: int) -> Path:
        return self.files[int(np.searchsorted(np.array(self.starts), row, side="right")) - 1]

    def __iter__(self) -> Iterator[tuple[RowKind, HashedRows]]:
        self.starts = []
        self.rows = 0
        self.damaged = DamagedRows()
        for file in self.files:
            self.starts.append(self.rows)
            kind = self.kind_of(file)
            if kind == "line":
                blocks = self._lines(file)
            elif kind == "record":
                blocks = self._records(file)
            else:
                blocks = self._tokens(file)
            for block in blocks:
                self.rows = block.stop
                yield kind, block

    def _lines(self, file: Path) -> Iterator[HashedRows]:
        first = self.rows
        with file.open("rb") as stream:
            rest = b""
            while chunk := stream.read(BLOCK_BYTES):
                chunk = rest + chunk
                end = chunk.rfind(b"\n") + 1
                if not end and len(chunk) < LONGEST_LINE:
                    rest = chunk
                    continue
                rest = chunk[end or len(chunk) :]
                block = self._hash_lines(chunk[: end or len(chunk)], first)
                first = block.stop
                yield block
            if rest:
                yield self._hash_lines(rest, first)

    def _hash_lines(self, chunk: bytes, first: int) -> HashedRows:
        self._note_damage(chunk, first)
        words, rows = hash_words(chunk)
        count = chunk.count(b"\n") + (not chunk.endswith(b"\n"))
        return HashedRows(words, rows + first, first, first + count)

    def _note_damage(self, chunk: bytes, first: int) -> None:
        try:
            chunk.decode()
        except UnicodeDecodeError:
            for index, line in enumerate(chunk.split(b"\n")):
                try:
                    line.decode()
                except UnicodeDecodeError as error:
                    self.damaged.add(first + index, f"byte 0x{line[error.start]:02x} is no UTF-8")
        if b"\0" in chunk:
            for index, line in enumerate(chunk.split(b"\n")):
                if b"\0" in line:
                    self.damaged.add(first + index, "a byte is 0")

    def _records(self, file: Path) -> Iterator[HashedRows]:
        first = self.rows
        row = first
        texts: list[str] = []
        for record in self._read_records(file, first):
            text = ""
            if record is not None:
                text, label = input_and_label(record)
                if label is not None and self.on_labeled is not None:
                    self.on_labeled(LabeledRow(row, text, label))
            row += 1
            texts.append(text.replace("\n", " "))
            if len(texts) >= BLOCK_ROWS or sum(map(len, texts[-50:])) > BLOCK_BYTES:
                yield _hash_texts(texts, first)
                first = row
                texts = []
        if texts:
            yield _hash_texts(texts, first)

    def _read_records(self, file: Path, first: int) -> Iterator[Any]:
        """The records of a file; None for those that cannot be read."""
        if file.suffix in (".csv", ".tsv"):
            yield from self._read_csv(file, first)
            return
        if file.suffix == ".json":
            if file.stat().st_size > MAX_JSON_BYTES:
                raise UserError(
                    f"{file} is one JSON text of more than {MAX_JSON_BYTES // 2**20} MB: write it as .jsonl"
                )
            try:
                content = json.loads(file.read_bytes())
            except ValueError as error:
                self.damaged.add(first, f"no JSON: {error}")
                yield None
                return
            records = (
                next((v for v in content.values() if isinstance(v, list)), [content])
                if isinstance(content, dict)
                else content
            )
            yield from records
            return
        with file.open("rb") as stream:
            for index, line in enumerate(stream):
                if not line.strip():
                    yield {"text": ""}
                    continue
                try:
                    yield json.loads(line)
                except UnicodeDecodeError as error:
                    self.damaged.add(first + index, f"byte 0x{line[error.start]:02x} is no UTF-8")
                    yield None
                except ValueError as error:
                    self.damaged.add(first + index, f"no JSON: {error}")
                    yield None

    def _read_csv(self, file: Path, first: int) -> Iterator[Any]:
        csv.field_size_limit(LONGEST_LINE)
        delimiter = "\t" if file.suffix == ".tsv" else ","
        with file.open(encoding="utf-8", errors="surrogateescape", newline="") as stream:
            reader = csv.reader(stream, delimiter=delimiter)
            header: list[str] | None = None
            index = 0
            for cells in reader:
                if header is None:
                    header = cells if _is_header(cells) else [f"column {n}" for n in range(len(cells))]
                    if header is cells:
                        # lines are counted as an editor shows them
                        yield HEADER
                        index += 1
                        continue
                bad = next((cell for cell in cells if any("\udc80" <= sign <= "\udcff" for sign in cell)), None)
                if bad is not None:
                    self.damaged.add(first + index, "bytes are no UTF-8")
                    yield None
                elif cells and len(cells) != len(header):
                    self.damaged.add(first + index, f"{len(cells)} cells for {len(header)} columns")
                    yield None
                else:
                    yield dict(zip(header, cells))
                index += 1

    def _tokens(self, file: Path) -> Iterator[HashedRows]:
        tokens = _load_tokens(file)
        first = self.rows
        if tokens.ndim == 2:
            step = max(1, BLOCK_TOKENS // max(tokens.shape[1], 1))
            for start in range(0, tokens.shape[0], step):
                part = np.asarray(tokens[start : start + step])
                rows = np.repeat(np.arange(part.shape[0]), part.shape[1]) + first + start
                yield HashedRows(_hash_tokens(part), rows, first + start, first + start + part.shape[0])
            return
        # in a stream each token is a row: its place is what is told
        for start in range(0, tokens.shape[0], BLOCK_TOKENS):
            part = np.asarray(tokens[start : start + BLOCK_TOKENS])
            rows = np.arange(part.shape[0]) + first + start
            yield HashedRows(_hash_tokens(part), rows, first + start, first + start + part.shape[0])


HEADER: dict[str, str] = {}
"""The record in the place of a header: its row is counted, but nothing of it is."""


def _is_binary(file: Path) -> bool:
    with file.open("rb") as stream:
        return b"\0" in stream.read(1024)


def _is_header(cells: list[str]) -> bool:
    names = {cell.strip().lower() for cell in cells}
    words = {*LABEL_NAMES, "text", "sentence", "sentence1", "input", "question", "prompt", "content", "review", "id"}
    return bool(names & words)


def input_and_label(record: Any) -> tuple[str, str | None]:
    """The text of a record's inputs, and its label where it has one beside them."""
    if isinstance(record, str):
        return record, None
    if isinstance(record, list):
        return " ".join(map(str, record)), None
    if not isinstance(record, Mapping):
        return str(record), None
    lower = {str(key).strip().lower(): key for key in record}
    name = next((each for each in LABEL_NAMES if each in lower), None)
    texts = [_text_of(value) for key, value in record.items() if name is None or key != lower[name]]
    texts = [text for text in texts if text]
    if name is None:
        return " ".join(texts), None
    label = _text_of(record[lower[name]], numbers=True)
    if len(record) == 1:
        # nothing is beside it: it is a text of that name
        return label, None
    return " ".join(texts), label


def _text_of(value: Any, *, numbers: bool = False) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list | tuple):
        return " ".join(filter(None, (_text_of(each, numbers=numbers) for each in value)))
    if isinstance(value, Mapping):
        return " ".join(filter(None, (_text_of(each, numbers=numbers) for each in value.values())))
    return str(value) if numbers and value is not None else ""


def _load_tokens(file: Path) -> NDArray[Any]:
    """The tokens of a file, mapped into memory. Raises UserError for what are no whole numbers."""
    if file.suffix == ".npy":
        try:
            tokens: NDArray[Any] = np.load(file, mmap_mode="r", allow_pickle=False)
        except ValueError as error:
            raise UserError(f"{file} is no array of tokens: {error}") from error
        if tokens.dtype.kind not in "iu" or tokens.ndim not in (1, 2):
            shown = f"{tokens.dtype} of {tokens.ndim} axes"
            raise UserError(f"{file} has {shown}; tokens are whole numbers in one axis or two (rows, tokens)")
        return tokens
    size = file.stat().st_size
    if size >= 1024 and int(np.fromfile(file, dtype="<i4", count=1)[0]) == TOKEN_HEADER:
        return np.memmap(file, dtype="<u2", mode="r", offset=1024, shape=((size - 1024) // 2,))
    sample = np.fromfile(file, dtype="<u2", count=4096)
    # of small numbers in 32 bits every second half is 0
    is_wide = size % 4 == 0 and sample.size >= 8 and not sample[1::2].any() and bool(sample[::2].any())
    width = 4 if is_wide else 2
    return np.memmap(file, dtype="<u4" if is_wide else "<u2", mode="r", shape=(size // width,))


# normalization: letters and digits in lower case, everything else between words
@cache
def _byte_tables() -> tuple[NDArray[np.bool_], Hashes, Hashes]:
    is_word = np.zeros(256, dtype=bool)
    for byte in range(256):
        is_word[byte] = byte >= 128 or chr(byte).isalnum()
    random = np.random.default_rng(20251128)
    values = random.integers(0, 2**64, 256, dtype=np.uint64)
    values[ord("A") : ord("Z") + 1] = values[ord("a") : ord("z") + 1]
    values[~is_word] = 0
    # odd factors, one for each place in a word
    factors = random.integers(0, 2**64, 4096, dtype=np.uint64) | np.uint64(1)
    return is_word, values, factors


def hash_words(chunk: bytes) -> tuple[Hashes, RowNumbers]:
    """A hash of each word of UTF-8 text, and the number of its line.

    Words are letters and digits without regard to case; characters of Chinese, Japanese and Korean are words each.
    """
    is_word, values, factors = _byte_tables()
    data = np.frombuffer(chunk, dtype=np.uint8)
    if not data.size:
        return np.zeros(0, dtype=np.uint64), np.zeros(0, dtype=np.int64)
    inside = is_word[data]
    # signs of general punctuation, such as dashes and quotes: e2 80 xx
    dashes = np.flatnonzero((data[:-2] == 0xE2) & (data[1:-1] == 0x80))
    for offset in range(3):
        inside[dashes + offset] = False
    is_lead = (data >= 0xE3) & (data <= 0xED)
    starts_word = inside.copy()
    starts_word[1:] &= ~inside[:-1] | is_lead[1:]
    if is_lead.any():
        is_ideograph = is_lead.copy()
        is_ideograph[1:] |= is_lead[:-1]
        is_ideograph[2:] |= is_lead[:-2]
        starts_word[1:] |= inside[1:] & is_ideograph[:-1] & ~is_ideograph[1:]
    starts = np.flatnonzero(starts_word)
    if not starts.size:
        return np.zeros(0, dtype=np.uint64), np.zeros(0, dtype=np.int64)
    lines = np.cumsum(data == 10, dtype=np.int32)[starts]
    begin = np.zeros(data.size, dtype=np.int32)
    begin[starts] = starts
    offsets = np.arange(data.size, dtype=np.int32) - np.maximum.accumulate(begin)
    parts = values[data]
    parts[~inside] = 0
    parts *= factors[offsets & 255]
    return mix(np.add.reduceat(parts, starts)), lines.astype(np.int64)


def _hash_texts(texts: list[str], first: int) -> HashedRows:
    # surrogates are no text, and a row that has some is not dropped for that
    chunk = "\n".join(texts).encode("utf-8", errors="replace")
    words, rows = hash_words(chunk)
    return HashedRows(words, rows + first, first, first + len(texts))


def _hash_tokens(tokens: NDArray[Any]) -> Hashes:
    return mix(tokens.reshape(-1).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(1))


def mix(values: Hashes) -> Hashes:
    """Spread every bit over all others."""
    values = values ^ (values >> np.uint64(31))
    values = values * np.uint64(0xBF58476D1CE4E5B9)
    return values ^ (values >> np.uint64(29))


def window_hashes(words: Hashes, size: int) -> Hashes:
    """The hash of every `size` words in succession, from those of windows of 1, 2, 4, ... words."""
    total: Hashes | None = None
    covered = 0
    block = words
    width = 1
    while True:
        if size & width:
            if total is None:
                total = block
            else:
                count = block.size - covered
                total = mix(total[:count] * np.uint64(0xD6E8FEB86659FD93) + block[covered:])
            covered += width
        if 2 * width > size:
            break
        block = mix(block[:-width] * np.uint64(0xA3B195354A39B70D) + block[width:])
        width *= 2
    assert total is not None
    return total[: max(words.size - size + 1, 0)]


def row_hashes(block: HashedRows) -> tuple[Hashes, RowNumbers, NDArray[np.int64]]:
    """Of each row that has words: the hash of all, its number, and how many they are."""
    if not block.words.size:
        return block.words, block.rows, np.zeros(0, dtype=np.int64)
    _, _, factors = _byte_tables()
    starts = np.flatnonzero(np.concatenate([[True], block.rows[1:] != block.rows[:-1]]))
    counts = np.diff(np.append(starts, block.rows.size))
    offsets = np.arange(block.words.size) - np.repeat(starts, counts)
    sums = np.add.reduceat(mix(block.words + offsets.astype(np.uint64)) * factors[offsets & 4095], starts)
    return mix(sums + counts.astype(np.uint64)), block.rows[starts], counts
