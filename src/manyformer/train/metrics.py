"""The metrics of a run as files: one JSON object a line, the same as a CSV table, and TensorBoard on request."""

import itertools
import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from manyformer.errors import UserError
from manyformer.train.durable_files import replace_text, room_for

MetricsRow = dict[str, Any]
COLUMNS = (
    "step",
    "tokens",
    "epoch",
    "seconds",
    "loss",
    "extra",
    "learning_rate",
    "gradient_norm",
    "tokens_per_second",
    "valid_loss",
    "valid_accuracy",
    "valid_perplexity",
    "valid_bits_per_byte",
)


class MetricsFiles:
    """Appends to metrics.jsonl and metrics.csv after the first `rows`; later ones are of steps that are made again."""

    def __init__(self, folder: Path, *, rows: int) -> None:
        self._jsonl, self._csv = folder / "metrics.jsonl", folder / "metrics.csv"
        kept = list(itertools.islice(read_rows(self._jsonl), rows))
        with room_for(f"the metrics in {folder}"):
            replace_text(self._jsonl, "".join(json.dumps(row) + "\n" for row in kept))
            replace_text(self._csv, "".join(_table(kept)))

    def add(self, row: MetricsRow) -> None:
        """One more row, on its way to the disk when this returns. Numbers that are not finite become null."""
        clean = {name: _finite(value) for name, value in row.items()}
        assert set(clean) <= set(COLUMNS), f"no column for {set(clean) - set(COLUMNS)}"
        with room_for(f"the metrics in {self._jsonl.parent}"):
            with self._jsonl.open("a", encoding="utf-8") as file:
                file.write(json.dumps(clean) + "\n")
            with self._csv.open("a", encoding="utf-8", newline="") as file:
                file.write(_line(clean))

    def close(self) -> None:
        """Nothing is left to do: every row is written when it comes."""


def read_rows(path: Path) -> Iterator[MetricsRow]:
    """The rows of a metrics.jsonl as far as they are whole: a kill may have cut the last one."""
    if not path.is_file():
        return
    with path.open(encoding="utf-8") as file:
        for line in file:
            try:
                row = json.loads(line)
            except ValueError:
                return
            # no part of an object is JSON, so that a row that lacks but its line end is whole
            yield row


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _table(rows: Iterable[MetricsRow]) -> Iterator[str]:
    yield ",".join(COLUMNS) + "\n"
    for row in rows:
        yield _line(row)


def _line(row: MetricsRow) -> str:
    # numbers and empty cells only: nothing to quote
    return ",".join("" if row.get(column) is None else str(row[column]) for column in COLUMNS) + "\n"


class TensorBoardSink:
    """The same rows as TensorBoard's event files, in the folder `tensorboard` of the run."""

    def __init__(self, folder: Path, *, last: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UserError('track: tensorboard needs one more library: pip install "manyformer[track]"') from error
        # rows after the checkpoint that a run goes on from are hidden
        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=last + 1)

    def add(self, row: MetricsRow) -> None:
        for name, value in row.items():
            if name != "step" and isinstance(value, int | float):
                group = "valid" if name.startswith("valid_") else "train"
                self._writer.add_scalar(f"{group}/{name.removeprefix('valid_')}", value, row["step"])
        # a kill must not take what people have seen go by
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
