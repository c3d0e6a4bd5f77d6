"""Tables whose rows an encoder reads as text: held-out rows are kept as strings, rows to label are read alike.

A label that is there in a table to label is compared alone."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import tee
from pathlib import Path
from typing import TypeVar

from manyformer.config import TabularTextData
from manyformer.data.csv_records import is_csv
from manyformer.data.hub import is_hub_dataset
from manyformer.data.kind import OpenRequest
from manyformer.data.length_buckets import LengthBuckets
from manyformer.data.opened import (
    EvaluationData,
    EvaluationPath,
    LengthLimit,
    UnlabelledData,
    UnlabelledInput,
    path_name,
    read_examples,
)
from manyformer.data.pair_tables import RowTable, open_table
from manyformer.data.saved_tokenizers import TokenizerPair, section_tokenizer
from manyformer.data.splits import PathOrPaths, Splits, path_list
from manyformer.data.table_columns import ColumnKey
from manyformer.data.table_files import TableRow, is_jsonl
from manyformer.data.table_pipeline import TablePipeline, examples_of_rows, training_rows
from manyformer.data.text_files import content_suffix
from manyformer.errors import UserError

TSV = frozenset({".tsv", ".tab"})

TabularT = TypeVar("TabularT", bound=TabularTextData)
"""The section of a table of texts."""


class TabularTextPipeline(TablePipeline[TabularT]):
    """Rows of texts for an encoder; `columns` are the settings that name the columns, the texts first."""

    prepared_settings = ("tokenizer", "vocab", "max_length")
    columns: tuple[str, ...]
    texts: int
    """How many of the columns are texts, from which a tokenizer is trained."""
    long_rows = "cut"

    def open_sources(self, paths: PathOrPaths, split: str) -> list[RowTable]:
        keys: list[ColumnKey | None] = [getattr(self.data, column) for column in self.columns]
        cache = self.request.cache
        header = self.data.header
        return [open_table(path, keys, self.columns, cache, header=header) for path in path_list(paths)]

    def train_tokenizers(self, splits: Splits[RowTable]) -> TokenizerPair:
        rows = training_rows(splits, required_cells=self.required_cells)
        tokenizer = section_tokenizer(self.data, (cell for row in rows for cell in row.cells[: self.texts]))
        return TokenizerPair(tokenizer, tokenizer, self.label_names(splits))

    def labels_of(self, row: TableRow) -> Sequence[str]:
        if self.tokenizers.labels is not None:
            return row.cells[-1:]
        return ()

    def label_names(self, splits: Splits[RowTable]) -> tuple[str, ...] | None:
        """The names of the labels, which are in the last column. Raises UserError if there is one alone."""
        labels = sorted({row.cells[-1] for row in training_rows(splits)})
        if len(labels) == 1:
            raise UserError(
                f"all training {self.title} have the label {labels[0]!r}; a classifier needs at least two labels"
            )
        return tuple(labels)

    def held_out(self, split: str | None) -> EvaluationData:
        evaluation = super().held_out(split)
        return evaluation._replace(examples=tuple(read_examples(self.request.cache, evaluation.name)))

    def from_file(self, path: EvaluationPath) -> EvaluationData:
        # as strings alone, so that a label that does not occur in training is an error of the model
        return EvaluationData(path_name(path), None, examples_of_rows(self.rows_of_file(path)))

    def length_limits(self, plans: Mapping[str, LengthBuckets]) -> Iterator[LengthLimit]:
        remedy = "cut such texts with data.max_length, or build a longer model"
        yield LengthLimit(max(plan.max_length for plan in plans.values()), "the longest text", remedy)


def is_table(path: str) -> bool:
    """Whether the name is that of a table, not of lines of text."""
    return is_hub_dataset(path) or is_jsonl(Path(path)) or is_csv(Path(path)) or content_suffix(Path(path)) in TSV


def open_unlabelled(
    path: str, keys: Sequence[ColumnKey | None], names: Sequence[str], data: TabularTextData, request: OpenRequest
) -> RowTable:
    """The table of inputs at `path`, whose last column, the label, may be missing."""
    table = open_table(path, keys, names, request.cache, header=data.header, optional=1)
    for note in table.notes:
        request.log(note)
    return table


def unlabelled_rows(
    table: RowTable,
    request: OpenRequest,
    *,
    name: Callable[[TableRow], str],
    texts: int = 1,
    labels: Collection[str] | None = None,
) -> UnlabelledData:
    """The rows of a table as inputs; the last cell is the label, empty where there is none.

    What else is in the table is logged at its end, and a label that is not one of `labels` once."""

    def rows() -> Iterator[TableRow]:
        unknown = False
        for row in table.rows():
            if labels is not None and row.cells[-1] and row.cells[-1] not in labels and not unknown:
                unknown = True
                request.log(
                    f"{row.location}: {row.cells[-1][:60]!r}, in the place of a label, is no label of this model; the "
                    "text is the cell in its own column alone"
                )
            yield row
        for finding in table.found():
            request.log(str(finding))

    read, named = tee(rows())
    inputs = (UnlabelledInput(name(row), expected=row.cells[-1] or None) for row in named)
    if texts == 1:
        return UnlabelledData(inputs, texts=(row.cells[0] for row in read))
    return UnlabelledData(inputs, pairs=((row.cells[0], row.cells[1]) for row in read))
