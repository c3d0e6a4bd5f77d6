"""Tables of pairs and labelled texts as rows of two cells."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path

from manyformer.data.hub import HubDataset, is_hub_dataset
from manyformer.data.normalization import NormalizationPair, generate_pairs
from manyformer.data.splits import DataSource
from manyformer.data.table_files import ColumnKey, TableRow, is_jsonl, read_parallel, read_rows
from manyformer.data.text_files import STDIN, existing_path, save_stdin
from manyformer.data.text_sources import file_stamp
from manyformer.errors import UserError

NORMALIZATION_CORPUS = "normalization"


class RowTable(DataSource):
    """A table of rows."""

    @abstractmethod
    def rows(self) -> Iterator[TableRow]:
        """Stream all rows in order."""


class FileTable(RowTable):
    """A table from a TSV or JSONL file."""

    def __init__(self, path: Path, columns: Sequence[ColumnKey]) -> None:
        self._path, self._columns, self.name = path, columns, str(path)

    def rows(self) -> Iterator[TableRow]:
        return read_rows(self._path, self._columns)

    def stamp(self) -> list[str | int]:
        return [*file_stamp(self._path), *self._columns]


class ParallelTable(RowTable):
    """A table from two files with corresponding lines."""

    def __init__(self, first: Path, second: Path) -> None:
        self._first, self._second, self.name = first, second, f"{first} and {second}"

    def rows(self) -> Iterator[TableRow]:
        return read_parallel(self._first, self._second)

    def stamp(self) -> list[str | int]:
        return [*file_stamp(self._first), *file_stamp(self._second)]


class HubTable(RowTable):
    """A table from a Hugging Face data set."""

    def __init__(self, path: str, columns: Sequence[ColumnKey]) -> None:
        self._dataset, self._columns, self.name = HubDataset(path), columns, path

    def rows(self) -> Iterator[TableRow]:
        return self._dataset.rows(self._columns)

    def stamp(self) -> list[str | int]:
        return [self.name, self._dataset.fingerprint, *self._columns]


class GeneratedTable(RowTable):
    """The default corpus of pairs, generated on first use."""

    name = "generated dates, amounts and numbers in 25 languages, to plain form"

    @cached_property
    def _pairs(self) -> list[NormalizationPair]:
        return generate_pairs()

    def rows(self) -> Iterator[TableRow]:
        return (TableRow(tuple(pair), f"pair {number}") for number, pair in enumerate(self._pairs))

    def stamp(self) -> list[str | int]:
        from importlib.metadata import version

        return [NORMALIZATION_CORPUS, version("babel"), version("unicode-rbnf")]


def open_table(
    path: str | Sequence[str], columns: Sequence[ColumnKey | None], names: Sequence[str], cache: Path
) -> RowTable:
    """The table at `path`: a file, a pair of files, a data set or the default corpus.

    A column in `columns` that is None defaults to its index in a TSV file, and to its name in `names` elsewhere.
    """
    named_columns = [name if column is None else column for column, name in zip(columns, names, strict=True)]
    numbered_columns = [number if column is None else column for number, column in enumerate(columns)]
    if not isinstance(path, str):
        return ParallelTable(existing_path(path[0]), existing_path(path[1]))
    if path == NORMALIZATION_CORPUS:
        return GeneratedTable()
    if is_hub_dataset(path):
        return HubTable(path, named_columns)
    resolved = save_stdin(cache / "stdin.txt") if path == STDIN else existing_path(path)
    if resolved.is_dir():
        raise UserError(
            f"{resolved}: this is a folder; give a TSV or JSONL file, or hf:{resolved} for a Hugging Face data set"
        )
    return FileTable(resolved, named_columns if is_jsonl(resolved) else numbered_columns)
