"""Tables of pairs and labelled texts as rows of two cells."""

from collections.abc import Callable, Iterator, Sequence
from functools import cache as cache_result
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from manyformer.data.hub import HubDataset, is_hub_dataset
from manyformer.data.normalization import NormalizationPair, generate_pairs
from manyformer.data.piped_input import data_path
from manyformer.data.splits import DataSource
from manyformer.data.summary import Finding, TableFindings
from manyformer.data.table_columns import ColumnKey, find_columns
from manyformer.data.table_files import TableRow, is_jsonl, read_parallel, read_rows
from manyformer.data.text_files import file_stamp
from manyformer.errors import UserError

NORMALIZATION_CORPUS = "normalization"
_NORMALIZATION_NAME = "generated dates, amounts and numbers in 25 languages, to plain form"


ReadRows = Callable[[TableFindings], Iterator[TableRow]]


class RowTable(DataSource):
    """A table of rows; `read` streams all of them in order and counts what else it finds."""

    def __init__(self, name: str, read: ReadRows, stamp: list[str | int], notes: tuple[str, ...] = ()) -> None:
        self.name = name
        self._read = read
        self._stamp = stamp
        self.notes = notes
        self._findings = TableFindings()
        self._limit: tuple[int, int] | None = None

    def rows(self) -> Iterator[TableRow]:
        """Stream all rows in order."""
        self._findings = TableFindings()
        rows = self._read(self._findings)
        if self._limit is None:
            return rows
        return self._first_rows(rows, *self._limit)

    def found(self) -> Iterator[Finding]:
        return self._findings.found()

    def limit(self, records: int, characters: int) -> None:
        self._limit = records, characters

    def _first_rows(self, rows: Iterator[TableRow], records: int, characters: int) -> Iterator[TableRow]:
        for number, row in enumerate(rows):
            if number >= records or characters <= 0:
                self.is_cut_short = True
                return
            characters -= sum(map(len, row.cells))
            yield row

    def mapped(self, change: Callable[[TableRow], TableRow]) -> "RowTable":
        """The table with every row changed."""
        return RowTable(self.name, lambda findings: map(change, self._read(findings)), self._stamp, self.notes)

    def stamp(self) -> list[str | int]:
        return self._stamp


def _locale_data_versions() -> tuple[str, str]:
    try:
        return version("babel"), version("unicode-rbnf")
    except PackageNotFoundError:
        raise UserError(
            f"data.path {NORMALIZATION_CORPUS} needs babel and unicode-rbnf: pip install 'manyformer[translate]'"
        ) from None


def open_table(
    path: str | Sequence[str],
    columns: Sequence[ColumnKey | None],
    names: Sequence[str],
    cache: Path,
    *,
    header: bool | None = None,
    optional: int = 0,
) -> RowTable:
    """The table at `path`: a file, a pair of files, a data set or the default corpus.

    A column in `columns` that is None is found by `find_columns` in a TSV or CSV, with or without a `header`, and
    defaults to its name in `names` elsewhere. The last `optional` columns may be missing; their cells are empty then.
    """
    named_columns = [name if column is None else column for column, name in zip(columns, names, strict=True)]
    if not isinstance(path, str):
        first, second = (data_path(side, cache) for side in path)
        stamp = [*file_stamp(first), *file_stamp(second)]
        return RowTable(f"{first} and {second}", lambda _: read_parallel(first, second), stamp)
    if path == NORMALIZATION_CORPUS:
        stamp = [NORMALIZATION_CORPUS, *_locale_data_versions()]
        # generated when they are first read
        pairs = cache_result(generate_pairs)
        return RowTable(_NORMALIZATION_NAME, lambda _: _normalization_rows(pairs), stamp)
    if is_hub_dataset(path):
        dataset = HubDataset(path)
        needed = len(columns) - optional

        def read(_: TableFindings) -> Iterator[TableRow]:
            return dataset.rows(named_columns, optional=optional)

        return RowTable(path, read, [path, dataset.fingerprint, *named_columns[:needed]])
    resolved = data_path(path, cache)
    if resolved.is_dir():
        raise UserError(
            f"{resolved}: this is a folder; give a TSV, CSV or JSONL file, or hf:{resolved} for a Hugging Face data set"
        )
    if is_jsonl(resolved):

        def read_fields(findings: TableFindings) -> Iterator[TableRow]:
            return read_rows(resolved, named_columns, optional=optional, findings=findings)

        return RowTable(str(resolved), read_fields, [*file_stamp(resolved), *named_columns])
    return _open_cells(resolved, columns, names, header=header, optional=optional)


def _open_cells(
    path: Path, keys: Sequence[ColumnKey | None], names: Sequence[str], *, header: bool | None, optional: int
) -> RowTable:
    """The table in a TSV or CSV file."""
    columns = find_columns(path, keys, names, header=header, optional=optional)

    def read(findings: TableFindings) -> Iterator[TableRow]:
        return read_rows(path, columns.indices, has_header=columns.has_header, optional=optional, findings=findings)

    # the stamp of a file that is read by the columns' places is that of earlier versions, which knew no headers
    settings = [number if key is None else key for number, key in enumerate(keys)]
    is_plain = not columns.has_header or (any(isinstance(key, str) for key in keys) and None not in keys)
    if is_plain:
        by_header = []
    else:
        by_header = ["header", *(str(index) for index in columns.indices)]
    return RowTable(str(path), read, [*file_stamp(path), *settings, *by_header], columns.notes)


def _normalization_rows(pairs: Callable[[], list[NormalizationPair]]) -> Iterator[TableRow]:
    return (TableRow(tuple(pair), f"pair {number}") for number, pair in enumerate(pairs()))
