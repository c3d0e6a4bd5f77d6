"""Which columns of a TSV or CSV file hold what: by the settings, else by the names in its header, else by position."""

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from manyformer.data.csv_records import Record, read_records
from manyformer.data.table_headers import (
    CHARACTERS_LOOKED_AT,
    OTHER_NAMES,
    ROWS_LOOKED_AT,
    HeaderGuess,
    guess_header,
    plain_name,
    usual_columns,
)
from manyformer.errors import UserError, suggest_names

ColumnKey = int | str
_SETTING_OF_ROLE = {"transcript": "label"}
"""The setting of a role that has another name."""
_SHOWN = 60
"""So many characters of a first line are shown."""


class TableColumns(NamedTuple):
    """The column of each role, counted from 0 (None for an optional one that is missing), and whether the first record
    is a header; `notes` are what to tell of it."""

    indices: tuple[int | None, ...]
    has_header: bool
    notes: tuple[str, ...] = ()


def find_columns(
    path: Path,
    keys: Sequence[ColumnKey | None],
    roles: Sequence[str],
    *,
    header: bool | None = None,
    optional: int = 0,
) -> TableColumns:
    """The columns of the roles in a file, whose first records are read.

    A key is the setting of a role: a number, a name, or None. The last `optional` roles may be missing. With `header`
    None the rule of `table_headers` decides whether there is one. Raises UserError for a name that the file lacks.
    """
    records = _first_records(path)
    if not records:
        return TableColumns(tuple(_positions(keys)), has_header=False)
    first, *rows = records
    where = first.location(str(path))
    if any(isinstance(key, str) for key in keys):
        if header is False:
            named = next(key for key in keys if isinstance(key, str))
            raise UserError(f"{where}: data.header=false says that no line names columns, and {named!r} is a name")
        return TableColumns(_named_columns(first.cells, keys, roles, where, optional), has_header=True)
    positions = _positions(keys, len(first.cells) if optional else None)
    guess = HeaderGuess.HEADER if header else HeaderGuess.ROW
    if header is None:
        guess = guess_header(first.cells, [row.cells for row in rows], roles, positions, optional)
    cells = ", ".join(first.cells)
    if len(cells) <= _SHOWN:
        names = cells
    else:
        names = f"{cells[:_SHOWN]}..."
    if guess is not HeaderGuess.HEADER:
        note = f"{where}: read as a row, and may be a header ({names}): data.header=true reads it as one"
        notes = (note,) if guess is HeaderGuess.MAYBE else ()
        return TableColumns(_present(positions, len(first.cells), optional), has_header=False, notes=notes)
    indices = _named_columns(first.cells, keys, roles, where, optional)
    columns = ", ".join(
        f"{role}: {first.cells[index]!r}"
        for role, index in zip(roles, indices)
        if index is not None and index < len(first.cells)
    )
    remedy = "; data.header=false reads it as a row"
    if header:
        remedy = ""
    return TableColumns(indices, has_header=True, notes=(f"{where}: taken as a header ({columns}){remedy}",))


def _first_records(path: Path) -> list[Record]:
    """The first records that are not blank, as many as are looked at."""

    def bounded() -> Iterator[Record]:
        characters = 0
        for record in read_records(path):
            characters += sum(map(len, record.cells))
            if record.cells:
                yield record
            if characters > CHARACTERS_LOOKED_AT:
                return

    return list(islice(bounded(), ROWS_LOOKED_AT + 1))


def _positions(keys: Sequence[ColumnKey | None], width: int | None = None) -> list[int]:
    """The columns by number: the role's own place where no setting gives one.

    A file of one column is that of the first role, wherever the settings have it, if `width` says that it has one."""
    if width == 1:
        return list(range(len(keys)))
    return [key if isinstance(key, int) else number for number, key in enumerate(keys)]


def _present(columns: Sequence[int], width: int, optional: int) -> tuple[int | None, ...]:
    """The columns, None for an optional one that a record of this width lacks."""
    required = len(columns) - optional
    return tuple(None if number >= required and column >= width else column for number, column in enumerate(columns))


def _named_columns(
    header: Sequence[str], keys: Sequence[ColumnKey | None], roles: Sequence[str], where: str, optional: int
) -> tuple[int | None, ...]:
    """The columns by the settings, then by the names that columns usually have, then the remaining ones in order."""
    by_setting = [None if key is None else index_of_column(key, header, where) for key in keys]
    usual = usual_columns(header, roles)
    taken = {index for index in by_setting if index is not None}
    columns = list(by_setting)
    for number, index in enumerate(usual):
        if columns[number] is None and index is not None and index not in taken:
            columns[number] = index
            taken.add(index)
    required = len(keys) - optional
    remaining = iter(number for number in range(len(header)) if number not in taken)
    for number in range(len(columns)):
        if columns[number] is None:
            column = next(remaining, None)
            # what is optional is not the number or the author of a text
            is_other = column is not None and plain_name(header[column]) in OTHER_NAMES
            if number >= required and (is_other or len(header) > len(keys)):
                columns[number] = None
            else:
                columns[number] = column
    for number, column in enumerate(columns[:required]):
        if column is None:
            raise UserError(
                f"{where}: this header has no column for the {roles[number]}; name it with "
                f"data.{_SETTING_OF_ROLE.get(roles[number], roles[number])}"
            )
    return tuple(columns)


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
    if names.count(key) > 1:
        raise UserError(f"{where}: {names.count(key)} columns have the name {key!r}; give the number of one of them")
    return names.index(key)
