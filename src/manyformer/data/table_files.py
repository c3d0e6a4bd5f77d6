"""Readers of TSV, CSV, JSONL and parallel text files as rows of columns; errors name the file and the line."""

import csv
import json
import re
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from pydantic_core import from_json

from manyformer.data.text_files import NumberedLine, content_suffix, read_lines
from manyformer.errors import UserError, suggest_names

_SURROGATES = re.compile("[\ud800-\udfff]")

ColumnKey = int | str
JSONL = frozenset({".jsonl", ".ndjson"})
CSV = ".csv"


class TableRow(NamedTuple):
    """The requested columns of one record, and its location (file and line) for messages."""

    cells: tuple[str, ...]
    location: str


def read_rows(path: Path, columns: Sequence[ColumnKey]) -> Iterator[TableRow]:
    """Read the records of a TSV, CSV or JSONL file. Raises UserError with the line that lacks a column."""
    return _read_jsonl(path, columns) if content_suffix(path) in JSONL else _read_lines_of_cells(path, columns)


def is_jsonl(path: Path) -> bool:
    """Whether the file's suffix is one of JSON lines."""
    return content_suffix(path) in JSONL


def read_parallel(first: Path, second: Path) -> Iterator[TableRow]:
    """Read line i of both files as one row. Raises UserError if the files have different numbers of lines."""
    for common_lines, (first_line, second_line) in enumerate(zip_longest(read_lines(first), read_lines(second))):
        if first_line is None or second_line is None:
            _raise_unequal_lengths(first, second, common_lines)
        yield TableRow((first_line.text, second_line.text), f"{first}:{first_line.number}")


def _raise_unequal_lengths(first: Path, second: Path, common_lines: int) -> None:
    counts = [sum(1 for _ in read_lines(path)) for path in (first, second)]
    shorter = (first, second)[counts[0] > counts[1]]
    raise UserError(
        f"{first} has {counts[0]:,} lines and {second} has {counts[1]:,}: "
        f"line {common_lines + 1} is the first that is missing in {shorter}"
    )


def _read_lines_of_cells(path: Path, columns: Sequence[ColumnKey]) -> Iterator[TableRow]:
    source, is_csv = read_lines(path), content_suffix(path) == CSV
    indices = [column for column in columns if isinstance(column, int)]
    if len(indices) < len(columns):
        header = _split_cells(next(source, NumberedLine(1, "")).text, f"{path}:1", is_csv=is_csv)
        indices = [_column_index(column, header, path) for column in columns]
    required = max(indices) + 1
    for number, text in source:
        cells = _split_cells(text, f"{path}:{number}", is_csv=is_csv)
        if len(cells) < required:
            separators = "commas" if is_csv else "tabs"
            raise UserError(
                f"{path}:{number}: column {required - 1} (counted from 0) is missing; "
                f"this line has {len(cells)} column{'s' * (len(cells) > 1)}, separated by {separators}"
            )
        yield TableRow(tuple(cells[i] for i in indices), f"{path}:{number}")


def _split_cells(text: str, location: str, *, is_csv: bool) -> list[str]:
    """The cells of a line, which may be quoted if they are separated by commas. Raises UserError for an open quote."""
    if not is_csv:
        return text.split("\t")
    try:
        return next(csv.reader([text], strict=True))
    except csv.Error as error:
        raise UserError(f"{location}: this line has no cells that are separated by commas ({error})") from None


def _column_index(column: ColumnKey, header: list[str], path: Path) -> int:
    if isinstance(column, int):
        return column
    if column not in header:
        raise UserError(f"{path}:1: the first line has no column {column!r}; {suggest_names(column, header)}")
    return header.index(column)


def _read_jsonl(path: Path, columns: Sequence[ColumnKey]) -> Iterator[TableRow]:
    for number, text in read_lines(path):
        if not text.strip():
            continue
        location = f"{path}:{number}"
        try:
            # its parser bounds the depth and the digits of a value
            record = from_json(text)
        except ValueError as error:
            problem = str(error).replace(" at line 1 column", ", column")
            raise UserError(f"{location}: this line is not a JSON object ({problem})") from None
        if not isinstance(record, dict):
            raise UserError(f'{location}: a JSON object such as {{"text": "..."}} is needed, and this is {text[:40]}')
        yield TableRow(tuple(cell_text(record, column, location) for column in columns), location)


def cell_text(record: dict[str, Any], column: ColumnKey, location: str) -> str:
    """The text of a field; a dot names a nested field (`translation.en`), and an integer becomes its digits."""
    value: Any = record
    for name in [column] if column in record else str(column).split("."):
        if not isinstance(value, dict) or name not in value:
            fields = value if isinstance(value, dict) else record
            raise UserError(f"{location}: column {column!r} is missing; {suggest_names(str(column), map(str, fields))}")
        value = value[name]
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
