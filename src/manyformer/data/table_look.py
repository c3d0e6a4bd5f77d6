"""Files of running text that look like tables: their separators, quotes and labels would be learned as text."""

import csv
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path

from manyformer.data.csv_records import is_csv
from manyformer.data.text_files import read_chunks

_BYTES_LOOKED_AT = 1 << 16
_RECORDS_LOOKED_AT = 50
_FEWEST_RECORDS = 3


def columns_of_table(path: Path) -> int:
    """The number of cells that all first records of a file have; 0 for one that does not look like a table.

    In a file that is no CSV by its name, cells are between tabs; a tab that begins every line, as in code, is none."""
    records = list(islice(_first_records(path), _RECORDS_LOOKED_AT))
    widths = {len(cells) for cells in records}
    if len(widths) != 1 or len(records) < _FEWEST_RECORDS or all(not cells[0].strip() for cells in records):
        return 0
    width = widths.pop()
    return width if width > 1 else 0


def _first_records(path: Path) -> Iterator[list[str]]:
    """The records that are whole in the first bytes of a file, without blank lines."""
    head = next(read_chunks(path, _BYTES_LOOKED_AT), "")
    lines = [f"{line}\n" for line in head.split("\n")[:-1]]
    if not is_csv(path):
        yield from (line.rstrip("\r\n").split("\t") for line in lines if line.strip())
        return
    with suppress(csv.Error):
        yield from (cells for cells in csv.reader(lines, strict=True) if cells)


def describe_tables(paths: Iterable[Path]) -> str:
    """What to tell of files that are read as running text and look like tables; "" if none does."""
    tables = [(path, width) for path in paths if (width := columns_of_table(path))]
    if not tables:
        return ""
    path, width = tables[0]
    more_files = f" (and {len(tables) - 1:,} more)" if len(tables) > 1 else ""
    return (
        f"{path}{more_files} looks like a table of {width} columns, and is read as running text, with separators, "
        f"quotes and labels; `manyformer train transformer-classifier data.path={path}` reads labelled texts, "
        f"`train transformer` pairs"
    )
