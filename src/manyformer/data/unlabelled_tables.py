"""Tables of inputs to predict labels for: read as training reads them; a label that is there is compared alone."""

from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import tee
from pathlib import Path

from manyformer.config import TabularTextData
from manyformer.data.csv_records import is_csv
from manyformer.data.hub import is_hub_dataset
from manyformer.data.kind import OpenRequest
from manyformer.data.opened import UnlabelledData, UnlabelledInput
from manyformer.data.pair_tables import RowTable, open_table
from manyformer.data.table_columns import ColumnKey
from manyformer.data.table_files import TableRow, is_jsonl
from manyformer.data.text_files import content_suffix

TSV = frozenset({".tsv", ".tab"})


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
