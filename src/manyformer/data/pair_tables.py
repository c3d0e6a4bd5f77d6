"""Tables of pairs and labelled texts as rows of two cells."""

from collections.abc import Callable, Iterator, Sequence
from functools import cache as cache_result
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from manyformer.data.hub import HubDataset, is_hub_dataset
from manyformer.data.normalization import NormalizationPair, generate_pairs
from manyformer.data.piped_input import data_path
from manyformer.data.splits import DataSource
from manyformer.data.table_files import ColumnKey, TableRow, is_jsonl, read_parallel, read_rows
from manyformer.data.text_files import file_stamp
from manyformer.errors import UserError

NORMALIZATION_CORPUS = "normalization"
_NORMALIZATION_NAME = "generated dates, amounts and numbers in 25 languages, to plain form"


class RowTable(DataSource):
    """A table of rows; `read` streams all of them in order."""

    def __init__(self, name: str, read: Callable[[], Iterator[TableRow]], stamp: list[str | int]) -> None:
        self.name, self._read, self._stamp = name, read, stamp

    def rows(self) -> Iterator[TableRow]:
        """Stream all rows in order."""
        return self._read()

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
    path: str | Sequence[str], columns: Sequence[ColumnKey | None], names: Sequence[str], cache: Path
) -> RowTable:
    """The table at `path`: a file, a pair of files, a data set or the default corpus.

    A column in `columns` that is None defaults to its index in a TSV file, and to its name in `names` elsewhere.
    """
    named_columns = [name if column is None else column for column, name in zip(columns, names, strict=True)]
    numbered_columns = [number if column is None else column for number, column in enumerate(columns)]
    if not isinstance(path, str):
        first, second = (data_path(side, cache) for side in path)
        stamp = [*file_stamp(first), *file_stamp(second)]
        return RowTable(f"{first} and {second}", partial(read_parallel, first, second), stamp)
    if path == NORMALIZATION_CORPUS:
        stamp = [NORMALIZATION_CORPUS, *_locale_data_versions()]
        # generated when they are first read
        return RowTable(_NORMALIZATION_NAME, partial(_normalization_rows, cache_result(generate_pairs)), stamp)
    if is_hub_dataset(path):
        dataset = HubDataset(path)
        return RowTable(path, partial(dataset.rows, named_columns), [path, dataset.fingerprint, *named_columns])
    resolved = data_path(path, cache)
    if resolved.is_dir():
        raise UserError(
            f"{resolved}: this is a folder; give a TSV, CSV or JSONL file, or hf:{resolved} for a Hugging Face data set"
        )
    file_columns = named_columns if is_jsonl(resolved) else numbered_columns
    return RowTable(str(resolved), partial(read_rows, resolved, file_columns), [*file_stamp(resolved), *file_columns])


def _normalization_rows(pairs: Callable[[], list[NormalizationPair]]) -> Iterator[TableRow]:
    return (TableRow(tuple(pair), f"pair {number}") for number, pair in enumerate(pairs()))
