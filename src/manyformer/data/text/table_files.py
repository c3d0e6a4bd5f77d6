"""Readers of TSV, CSV, JSONL and parallel text files as rows of columns; errors name the file and the line.

In CSV (RFC 4180) quoted cells may hold line ends; in TSV a line is a record, and quotes are characters."""

import csv
import json
import re
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from pydantic_core import from_json

from manyformer.base.errors import UserError, suggest_names
from manyformer.data.pipeline.summary import TableFindings
from manyformer.data.text.text_files import MAX_LINE_CHARACTERS, content_suffix, line_blocks, read_chunks, read_lines

CSV = ".csv"
JSONL = frozenset({".jsonl", ".ndjson"})
MAX_RECORD_CHARACTERS = MAX_LINE_CHARACTERS
"""The longest record that is read: an open quote must not take the rest of a large file."""
_REASONS = {
    "unexpected end of data": "the quote that opens in it is not closed before the end of the file",
    "',' expected after '\"'": "after the quote that closes a cell there is neither a comma nor the end of the line",
    "new-line character seen in unquoted field": "a carriage return stands in it without a line feed, outside of "
    "quotes; let lines end with \\n or \\r\\n",
}
_SEPARATORS = {"\t": "tabs", ";": "semicolons", ",": "commas", "|": "bars"}
_SURROGATES = re.compile("[\ud800-\udfff]")
ColumnKey = int | str
"""A column by its number, counted from 0, or by its name."""


class Record(NamedTuple):
    """The cells of a record, none for a blank line, and its first and last line in the file, counted from 1."""

    cells: list[str]
    first: int
    last: int

    def location(self, name: str) -> str:
        """The place of the record in the file of that name, for messages."""
        if self.first == self.last:
            return f"{name}:{self.first}"
        return f"{name}:{self.first}-{self.last}"


class TableRow(NamedTuple):
    """The requested columns of one record, and its location (file and line) for messages."""

    cells: tuple[str, ...]
    location: str


def is_csv(path: Path) -> bool:
    """Whether the file's suffix is that of CSV; every other table but JSONL is TSV."""
    return content_suffix(path) == CSV


def is_jsonl(path: Path) -> bool:
    """Whether the file's suffix is one of JSON lines."""
    return content_suffix(path) in JSONL


def read_rows(
    path: Path,
    columns: Sequence[ColumnKey | None],
    *,
    has_header: bool = False,
    optional: int = 0,
    findings: TableFindings | None = None,
) -> Iterator[TableRow]:
    """Read the records of a TSV, CSV or JSONL file. Raises UserError with the line that lacks a column.

    Columns by number are read from all records, or from those after the header; one by name means that there is one.
    The last `optional` columns may be missing, in which case their cells are empty; None is one that is. `findings`
    counts what else is in the file.
    """
    notes = TableFindings() if findings is None else findings
    # by the name: a line of JSON is a valid line of TSV, too
    if is_jsonl(path):
        return _read_jsonl(path, columns, optional, notes)
    return _read_cells(path, columns, optional, notes, has_header=has_header)


def read_parallel(first: Path, second: Path) -> Iterator[TableRow]:
    """Read line i of both files as one row. Raises UserError if the files have different numbers of lines."""
    # the shorter file must not end the pairs without a word
    for common_lines, (first_line, second_line) in enumerate(zip_longest(read_lines(first), read_lines(second))):
        if first_line is None or second_line is None:
            _raise_unequal_lengths(first, second, common_lines)
        yield TableRow((first_line.text, second_line.text), f"{first}:{first_line.number}")


def _raise_unequal_lengths(first: Path, second: Path, common_lines: int) -> None:
    # read once more, and only for the message
    counts = [sum(1 for _ in read_lines(path)) for path in (first, second)]
    shorter = (first, second)[counts[0] > counts[1]]
    raise UserError(
        f"{first} has {counts[0]:,} lines and {second} has {counts[1]:,}: "
        f"line {common_lines + 1} is the first that is missing in {shorter}"
    )


def _read_cells(
    path: Path, columns: Sequence[ColumnKey | None], optional: int, findings: TableFindings, *, has_header: bool
) -> Iterator[TableRow]:
    records = read_records(path)
    name = str(path)
    header = Record([], 1, 1)
    if has_header or any(isinstance(column, str) for column in columns):
        # blank lines may stand before a header
        header = next((record for record in records if record.cells), header)
    where = header.location(name)
    indices = [-1 if column is None else index_of_column(column, header.cells, where) for column in columns]
    needed = max(indices[: len(indices) - optional]) + 1
    width = len(header.cells)
    for record in records:
        cells = record.cells
        location = record.location(name)
        # one comparison for each ordinary row: only those of another width are looked at
        if len(cells) != width:
            if not cells:
                findings.blank.add(location)
                continue
            if len(cells) < needed:
                _raise_missing_column(path, location, needed - 1, cells)
            if width:
                findings.uneven.add(location)
            # without a header the first row decides the width
            width = width or len(cells)
        # two forms, since rows without optional columns need no check of each index
        if optional:
            yield TableRow(tuple(cells[i] if 0 <= i < len(cells) else "" for i in indices), location)
        else:
            yield TableRow(tuple([cells[i] for i in indices]), location)


def _raise_missing_column(path: Path, location: str, column: int, cells: Sequence[str]) -> None:
    separator = "commas" if is_csv(path) else "tabs"
    count = len(cells)
    if elsewhere := [name for sign, name in _SEPARATORS.items() if name != separator and sign in "".join(cells)]:
        hint = f"; it has {elsewhere[0]}, which separate no cells here"
    else:
        hint = "; quotes join no lines in a TSV, as they do in a CSV"
        if is_csv(path):
            hint = ""
    raise UserError(
        f"{location}: column {column} (counted from 0) is missing; "
        f"this line has {count} column{'s' * (count > 1)}, separated by {separator}{hint}"
    )


def index_of_column(key: ColumnKey, header: Sequence[str], where: str) -> int:
    """The number of a column, given by number or by name."""
    if isinstance(key, int):
        return key
    if key in header:
        names = list(header)
    else:
        names = [cell.strip() for cell in header]
    if key not in names:
        raise UserError(f"{where}: the first line has no column {key!r}; {suggest_names(key, names)}")
    # the first of them would be a guess
    if names.count(key) > 1:
        raise UserError(f"{where}: {names.count(key)} columns have the name {key!r}; give the number of one of them")
    return names.index(key)


def _read_jsonl(
    path: Path, columns: Sequence[ColumnKey | None], optional: int, findings: TableFindings
) -> Iterator[TableRow]:
    needed = len(columns) - optional
    for number, text in read_lines(path):
        location = f"{path}:{number}"
        if not text.strip():
            findings.blank.add(location)
            continue
        try:
            # its parser bounds the depth and the digits of a value
            record = from_json(text)
        except ValueError as error:
            problem = str(error).replace(" at line 1 column", ", column")
            raise UserError(f"{location}: this line is not a JSON object ({problem})") from None
        if not isinstance(record, dict):
            raise UserError(f'{location}: a JSON object such as {{"text": "..."}} is needed, and this is {text[:40]}')
        cells = [cell_text(record, str(column), location) for column in columns[:needed]]
        cells += [optional_text(record, str(column)) for column in columns[needed:]]
        yield TableRow(tuple(cells), location)


def optional_text(record: dict[str, Any], column: str) -> str:
    """The text of a field, "" where there is none or it is no text."""
    try:
        return cell_text(record, column, "")
    except UserError:
        return ""


def cell_text(record: dict[str, Any], column: ColumnKey, location: str) -> str:
    """The text of a field; a dot names a nested field (`translation.en`), and an integer becomes its digits."""
    value: Any = record
    # a field whose own name has a dot is meant before a nested one
    for name in [column] if column in record else str(column).split("."):
        if not isinstance(value, dict) or name not in value:
            fields = value if isinstance(value, dict) else record
            raise UserError(f"{location}: column {column!r} is missing; {suggest_names(str(column), map(str, fields))}")
        value = value[name]
    # a bool is an int for Python, and its text would be True
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise UserError(
            f"{location}: column {column!r} must be text, and this is {json.dumps(value, default=str)[:40]}"
        )
    text = str(value)
    if not text.isascii() and _SURROGATES.search(text):
        raise UserError(
            f"{location}: column {column!r} holds half a character (a lone surrogate), which is not valid Unicode"
        )
    return text


def read_records(path: Path) -> Iterator[Record]:
    """The records of a TSV or CSV file, blank lines too. Raises UserError with the lines of what is no record."""
    if is_csv(path):
        return _read_csv(path)
    return _read_tsv(path)


def _read_tsv(path: Path) -> Iterator[Record]:
    # quotes are characters, as in the files of most corpora: only a tab ends a cell, and only a line end a record
    for number, text in read_lines(path):
        yield Record(text.split("\t") if "\t" in text or text.strip() else [], number, number)


def _read_csv(path: Path) -> Iterator[Record]:
    """The records as `csv.reader` gives them, in strict mode."""
    # the limit is that of the process: raised, never lowered, since a cell may be a whole document
    csv.field_size_limit(max(csv.field_size_limit(), MAX_RECORD_CHARACTERS))
    source = _RecordLines(path)
    reader = csv.reader(source.lines(), strict=True)
    first = 1
    while True:
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            where = Record([], first, max(first, reader.line_num)).location(str(path))
            reason = next((text for part, text in _REASONS.items() if part in str(error)), str(error))
            raise UserError(f"{where}: this is no record of CSV: {reason}") from None
        last = reader.line_num
        # the reader has taken all lines of this record and none of the next one
        source.characters = 0
        source.first = last + 1
        # for `csv` a line of spaces is a record of one cell
        if len(cells) == 1 and not cells[0].strip():
            cells = []
        yield Record(cells, first, last)
        first = last + 1


class _RecordLines:
    """The lines of a file for `csv.reader`, with their line ends, counting the characters of the current record."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.characters = 0
        self.first = 1

    def lines(self) -> Iterator[str]:
        """The lines. Raises UserError for a record that is too long."""
        for block in line_blocks(read_chunks(self.path), str(self.path)):
            for text in block.lines:
                self.characters += len(text)
                if self.characters > MAX_RECORD_CHARACTERS:
                    raise UserError(
                        f"{self.path}:{self.first}: the record that begins here has more than "
                        f"{MAX_RECORD_CHARACTERS:,} characters; is a quote in it not closed?"
                    )
                yield f"{text}\n" if block.are_ended else text
