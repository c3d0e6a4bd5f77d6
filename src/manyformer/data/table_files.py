"""Rows of columns: TSV, JSONL and parallel files, read line by line, each mistake told with its file and line."""

import json
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from manyformer.data.text_files import NumberedLine, kind_of, lines
from manyformer.errors import UserError, nearest

ColumnKey = int | str
JSONL = frozenset({".jsonl", ".ndjson"})


class TableRow(NamedTuple):
    """The asked columns of one record, and where it stands (for messages)."""

    cells: tuple[str, ...]
    where: str


def rows(path: Path, columns: Sequence[ColumnKey]) -> Iterator[TableRow]:
    """The records of a TSV or JSONL file; UserError names the line that lacks a column."""
    return _jsonl(path, columns) if kind_of(path) in JSONL else _tsv(path, columns)


def is_jsonl(path: Path) -> bool:
    """Whether the ending says that each line is a JSON object."""
    return kind_of(path) in JSONL


def parallel(first: Path, second: Path) -> Iterator[TableRow]:
    """Line i of both files; UserError where one has more lines than the other."""
    for shared, (one, other) in enumerate(zip_longest(lines(first), lines(second))):
        if one is None or other is None:
            _refuse_unequal(first, second, shared)
        yield TableRow((one.text, other.text), f"{first}:{one.number}")


def _refuse_unequal(first: Path, second: Path, shared: int) -> None:
    counts = [sum(1 for _ in lines(path)) for path in (first, second)]
    short = (first, second)[counts[0] > counts[1]]
    raise UserError(
        f"{first} has {counts[0]:,} lines and {second} has {counts[1]:,}: "
        f"line {shared + 1} is the first that is missing, in {short}"
    )


def _tsv(path: Path, columns: Sequence[ColumnKey]) -> Iterator[TableRow]:
    source = lines(path)
    numbers = [column for column in columns if isinstance(column, int)]
    if len(numbers) < len(columns):
        head = next(source, NumberedLine(1, "")).text.split("\t")
        numbers = [_numbered(column, head, path) for column in columns]
    least = max(numbers) + 1
    for number, text in source:
        cells = text.split("\t")
        if len(cells) < least:
            raise UserError(
                f"{path}:{number}: column {least - 1} (counted from 0) is missing; "
                f"this line has {len(cells)} column{'s' * (len(cells) > 1)}, separated by tabs"
            )
        yield TableRow(tuple(cells[i] for i in numbers), f"{path}:{number}")


def _numbered(column: ColumnKey, head: list[str], path: Path) -> int:
    if isinstance(column, int):
        return column
    if column not in head:
        raise UserError(f"{path}:1: the first line has no column {column!r}; {nearest(column, head)}")
    return head.index(column)


def _jsonl(path: Path, columns: Sequence[ColumnKey]) -> Iterator[TableRow]:
    for number, text in lines(path):
        if not text.strip():
            continue
        where = f"{path}:{number}"
        try:
            record = json.loads(text)
        except json.JSONDecodeError as error:
            raise UserError(
                f"{where}: not a JSON object on a line of its own ({error.msg}, column {error.colno})"
            ) from None
        if not isinstance(record, dict):
            raise UserError(f'{where}: a JSON object such as {{"text": "..."}} is needed, and this is {text[:40]}')
        yield TableRow(tuple(cell(record, column, where) for column in columns), where)


def cell(record: dict[str, Any], column: ColumnKey, where: str) -> str:
    """A field as text; a dot goes into a record inside (`translation.en`); a number becomes its digits."""
    value: Any = record
    for name in [column] if column in record else str(column).split("."):
        if not isinstance(value, dict) or name not in value:
            known = value if isinstance(value, dict) else record
            raise UserError(f"{where}: column {column!r} is missing; {nearest(str(column), map(str, known))}")
        value = value[name]
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise UserError(f"{where}: column {column!r} must be text, and this is {json.dumps(value, default=str)[:40]}")
    text = str(value)
    if any("\ud800" <= sign <= "\udfff" for sign in text):
        raise UserError(
            f"{where}: column {column!r} holds half a character (a lone surrogate), which is not valid Unicode"
        )
    return text
