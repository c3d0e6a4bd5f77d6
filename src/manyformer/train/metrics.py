"""Metrics files of a run: JSON lines, the same rows as a CSV table, and TensorBoard event files on request."""

import itertools
import json
import math
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from manyformer.errors import UserError
from manyformer.train.durable_files import replace_text, report_disk_full

MetricsRow = dict[str, Any]
_COUNT_COLUMNS = ("step", "tokens", "epoch", "seconds")
_TRAINING_COLUMNS = ("loss", "extra", "learning_rate", "gradient_norm", "tokens_per_second")
_VALIDATION_COLUMNS = ("valid_loss", "valid_accuracy", "valid_perplexity", "valid_bits_per_byte")
COLUMNS = (*_COUNT_COLUMNS, *_TRAINING_COLUMNS, *_VALIDATION_COLUMNS)


class MetricsFiles:
    """Appends rows to metrics.jsonl and metrics.csv; on resuming, only the first `rows` rows are retained.

    `scores` are the names of the validation scores; those that have no column yet get one at the end.
    """

    def __init__(self, folder: Path, *, rows: int, scores: Iterable[str] = ()) -> None:
        self._jsonl, self._csv = folder / "metrics.jsonl", folder / "metrics.csv"
        self._columns = tuple(dict.fromkeys([*COLUMNS, *(f"valid_{name}" for name in scores)]))
        retained = list(itertools.islice(read_rows(self._jsonl), rows))
        with report_disk_full(f"the metrics in {folder}"):
            replace_text(self._jsonl, "".join(json.dumps(row) + "\n" for row in retained))
            replace_text(self._csv, "".join([",".join(self._columns) + "\n", *map(self._csv_line, retained)]))

    def add(self, row: MetricsRow) -> None:
        """Append a row and flush it. Numbers that are not finite become null."""
        clean = {name: value if math.isfinite(value) else None for name, value in row.items()}
        assert set(clean) <= set(self._columns), f"no column for {set(clean) - set(self._columns)}"
        with report_disk_full(f"the metrics in {self._jsonl.parent}"):
            with self._jsonl.open("a", encoding="utf-8") as file:
                file.write(json.dumps(clean) + "\n")
            with self._csv.open("a", encoding="utf-8", newline="") as file:
                file.write(self._csv_line(clean))

    def _csv_line(self, row: MetricsRow) -> str:
        # numbers and empty cells only: nothing to quote
        return ",".join("" if row.get(column) is None else str(row[column]) for column in self._columns) + "\n"

    def close(self) -> None:
        """Nothing to close: every row is written by `add`."""


def read_rows(path: Path) -> Iterator[MetricsRow]:
    """Yield the complete rows of a metrics.jsonl; the last one may be truncated by a kill."""
    if not path.is_file():
        return
    # no proper prefix of an object is valid JSON, so a row that parses is complete even without its line end
    with path.open(encoding="utf-8") as file, suppress(ValueError):
        yield from map(json.loads, file)


class TensorBoardSink:
    """Writes the same rows as TensorBoard event files in the folder `tensorboard` of the run."""

    def __init__(self, folder: Path, *, last_step: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UserError('track: tensorboard needs one more library: pip install "manyformer[track]"') from error
        # TensorBoard hides rows after the checkpoint that the run resumes from
        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=last_step + 1)

    def add(self, row: MetricsRow) -> None:
        for name, value in row.items():
            if name != "step" and isinstance(value, int | float):
                group = "valid" if name.startswith("valid_") else "train"
                self._writer.add_scalar(f"{group}/{name.removeprefix('valid_')}", value, row["step"])
        # a kill must not lose rows that have already been displayed
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
