"""Tables of rows by their paths: files, pairs of files, Hugging Face data sets, and the default corpus of pairs.

Data sets, by name or from a local folder in their format, need the `data` extra."""

from collections.abc import Callable, Iterator, Sequence
from functools import cache as cache_result
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from manyformer.base.errors import UserError, list_names
from manyformer.base.libraries import load_dataset_split, load_saved_dataset, without_decoding
from manyformer.data.generated.normalization import NormalizationPair, generate_pairs
from manyformer.data.pipeline.data_paths import (
    HUB_PREFIX,
    NORMALIZATION_CORPUS,
    data_path,
    is_hub_dataset,
    is_saved_to_disk,
)
from manyformer.data.pipeline.splits import DataSource
from manyformer.data.pipeline.summary import Finding, TableFindings
from manyformer.data.text.table_columns import find_columns
from manyformer.data.text.table_files import (
    ColumnKey,
    TableRow,
    cell_text,
    is_jsonl,
    optional_text,
    read_parallel,
    read_rows,
)
from manyformer.data.text.text_files import file_stamp

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
            # by characters too: rows may be long documents
            characters -= sum(map(len, row.cells))
            yield row

    def mapped(self, change: Callable[[TableRow], TableRow]) -> "RowTable":
        """The table with every row changed."""
        # lazily, as rows are read: the table may be larger than the memory
        return RowTable(self.name, lambda findings: map(change, self._read(findings)), self._stamp, self.notes)

    def stamp(self) -> list[str | int]:
        return self._stamp


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


def _locale_data_versions() -> tuple[str, str]:
    try:
        # part of the stamp: another version of CLDR generates other pairs
        return version("babel"), version("unicode-rbnf")
    except PackageNotFoundError:
        raise UserError(
            f"data.path {NORMALIZATION_CORPUS} needs babel and unicode-rbnf: pip install 'manyformer[translate]'"
        ) from None


class HubDataset:
    """One split of a data set: `hf:NAME`, `hf:NAME@CONFIG`, `hf:NAME#SPLIT` (by default the split `train`)."""

    def __init__(self, path: str) -> None:
        self.path = path
        name_and_config, _, split = path.removeprefix(HUB_PREFIX).partition("#")
        self.name, _, config = name_and_config.partition("@")
        self.split = split or "train"
        self._records = _load_split(self.name, config or None, self.split)
        # the library changes it with every change of the data
        self.fingerprint: str = str(self._records._fingerprint)

    def __len__(self) -> int:
        return len(self._records)

    def rows(self, columns: Sequence[ColumnKey], *, optional: int = 0) -> Iterator[TableRow]:
        """Stream the requested columns of the records in order; class labels are given by name if they have names.

        The last `optional` columns may be missing; their cells are empty then."""
        names = {column: _label_names(self._records.features, column) for column in columns}
        needed = len(columns) - optional
        for number, record in enumerate(without_decoding(self._records)):
            location = f"{self.path}, record {number}"
            cells = [cell_text(record, column, location) for column in columns[:needed]]
            cells += [optional_text(record, str(column)) for column in columns[needed:]]
            yield TableRow(
                tuple(_label_text(text, names[column]) for text, column in zip(cells, columns, strict=True)), location
            )


def _label_text(text: str, names: list[str] | None) -> str:
    # -1 marks a record without a label, as in test sets with hidden labels.
    if names and text.isdecimal() and int(text) < len(names):
        return names[int(text)]
    return text


def _label_names(features: Any, column: ColumnKey) -> list[str] | None:
    names = getattr(features.get(column), "names", None)
    if names:
        return list(names)
    return None


def _load_split(name: str, config: str | None, split: str) -> Any:
    try:
        if is_saved_to_disk(Path(name)):
            dataset = _select_split(load_saved_dataset(name), config, split, name)
        else:
            dataset = load_dataset_split(name, config, split)
        # without this pass over the data, reading a damaged file can end the process with a signal
        dataset.data.table.validate(full=True)
        return dataset
    except UserError:
        raise
    # The library raises a dozen exception classes, all of which mean that this data set cannot be loaded.
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "datasets":
            raise UserError(
                f"data.path {HUB_PREFIX}{name} needs the `datasets` library: pip install 'manyformer[data]'"
            ) from None
        sentence = " ".join(str(error).split())
        raise UserError(
            f"{HUB_PREFIX}{name}: this data set cannot be loaded ({type(error).__name__}: {sentence})"
        ) from error


def _select_split(saved: Any, config: str | None, split: str, name: str) -> Any:
    """The split of a data set, or of several splits, from a folder."""
    if isinstance(saved, dict):
        splits = saved
    else:
        # a data set without splits is training data
        splits = {"train": saved}
    if config is not None:
        raise UserError(f"{HUB_PREFIX}{name}: a folder has no configurations; leave out @{config}")
    if split not in splits:
        raise UserError(f"{HUB_PREFIX}{name}: there is no split {split!r}; it has {list_names(splits)}")
    return splits[split]
