"""Metrics files of a run: JSON lines, and the same rows as a CSV table."""

import functools
import hashlib
import itertools
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from manyformer.files.atomic_files import append_bytes, atomic_write_bytes, atomic_write_text
from manyformer.files.json_records import DamagedFile, parse_json, validate_json
from manyformer.files.json_text import json_text
from manyformer.type_aliases import LogFn

MetricsRow = dict[str, Any]
DAMAGED_ROWS = "metrics.damaged"
_COUNTS = ("step", "tokens", "seconds")
TIME_COLUMNS = ("seconds", "tokens_per_second", "data_wait")
"""What depends on the clock, and differs between two equal runs."""
_COUNT_COLUMNS = ("step", "tokens", "epoch", "seconds")
_TRAINING_COLUMNS = ("loss", "extra", "learning_rate", "gradient_norm", "tokens_per_second", "data_wait")
_VALIDATION_COLUMNS = ("valid_loss", "valid_accuracy", "valid_perplexity", "valid_bits_per_byte")
COLUMNS = (*_COUNT_COLUMNS, *_TRAINING_COLUMNS, *_VALIDATION_COLUMNS)


class MetricsFiles:
    """Appends rows to metrics.jsonl and metrics.csv; on resuming, only the first `rows` rows are retained.

    `scores` are the columns of scores; those that are not among the usual ones come last. Damaged rows are
    named in the log and moved to metrics.damaged; missing ones are counted. `rows_sum` is the sum of the first `rows`
    rows, if it is known.
    """

    def __init__(
        self, folder: Path, *, rows: int, log: LogFn, rows_sum: str | None = None, scores: Iterable[str] = ()
    ) -> None:
        self._jsonl = folder / "metrics.jsonl"
        self._csv = folder / "metrics.csv"
        self._columns = tuple(dict.fromkeys([*COLUMNS, *scores]))
        retained = self._retain(rows, log)
        if rows_sum not in (None, functools.reduce(extend_sum, retained, "")) and len(retained) == rows:
            log(f"{self._jsonl} is not as it was written: a number in its first {rows:,} rows differs")
        atomic_write_text(self._jsonl, "".join(json_text(row, ensure_ascii=True) + "\n" for row in retained))
        atomic_write_text(self._csv, "".join([",".join(self._columns) + "\n", *map(self._csv_line, retained)]))

    def _retain(self, rows: int, log: LogFn) -> list[MetricsRow]:
        """The first `rows` rows, without those that are damaged."""
        lines = list(itertools.islice(_read_lines(self._jsonl), rows))
        damaged = [line for line in lines if isinstance(line.row, DamagedFile)]
        for line in damaged:
            log(f"{line.row}; it is now in {DAMAGED_ROWS}")
        if damaged:
            content = b"".join(line.text for line in damaged)
            atomic_write_bytes(self._jsonl.parent / DAMAGED_ROWS, content)
        if len(lines) < rows:
            log(f"{self._jsonl} has {len(lines):,} rows, {rows:,} were written: {rows - len(lines):,} are missing")
        return [line.row for line in lines if not isinstance(line.row, DamagedFile)]

    def add(self, row: MetricsRow) -> None:
        """Append a row and flush it."""
        assert set(row) <= set(self._columns), f"no column for {set(row) - set(self._columns)}"
        append_bytes(self._jsonl, f"{json_text(row, ensure_ascii=True)}\n".encode())
        append_bytes(self._csv, self._csv_line(row).encode())

    def _csv_line(self, row: MetricsRow) -> str:
        # numbers and empty cells only: nothing to quote
        return ",".join("" if row.get(column) is None else str(row[column]) for column in self._columns) + "\n"

    def close(self) -> None:
        """Nothing to close: every row is written by `add`."""


def finite_row(row: MetricsRow) -> MetricsRow:
    """The row with None for numbers that are not finite, which JSON does not have."""
    return {name: value if value is not None and math.isfinite(value) else None for name, value in row.items()}


def extend_sum(rows_sum: str, row: MetricsRow) -> str:
    """A hash of the rows with the sum `rows_sum` and one more, without the columns that no two runs have in common."""
    numbers = json_text(
        {name: value for name, value in row.items() if name not in TIME_COLUMNS}, sort_keys=True, ensure_ascii=True
    )
    return hashlib.sha256(f"{rows_sum}{numbers}".encode()).hexdigest()[:16]


def read_rows(path: Path) -> Iterator[MetricsRow]:
    """Yield the rows of a metrics.jsonl; the last one may be truncated by a kill. Raises DamagedFile for others."""
    for line in _read_lines(path):
        if isinstance(line.row, DamagedFile):
            raise DamagedFile(f"{line.row}; the command that trains the run sets such rows aside")
        yield line.row


class _MetricsLine(NamedTuple):
    text: bytes
    row: MetricsRow | DamagedFile


def _read_lines(path: Path) -> Iterator[_MetricsLine]:
    """Yield the lines of a metrics.jsonl, but not a last one that is truncated."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        for number, text in enumerate(file, start=1):
            location = f"{path}:{number}"
            try:
                content = parse_json(text, location, "a row of metrics")
                row: MetricsRow = validate_json(content, dict[str, int | float | None], location)
                if missing := [name for name in _COUNTS if row.get(name) is None]:
                    raise DamagedFile(f"{location} is damaged: {missing[0]} is missing")
                yield _MetricsLine(text, row)
            except DamagedFile as damage:
                # no proper prefix of an object is valid JSON: a row that parses is complete even without its line end
                if text.endswith(b"\n"):
                    yield _MetricsLine(text, damage)
