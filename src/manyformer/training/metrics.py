"""Where the rows of metrics of a run go: files, JSON lines and a CSV table, and trackers through their own libraries.

TensorBoard, Weights & Biases and MLflow are imported where a run names them."""

import functools
import hashlib
import itertools
import math
import os
import re
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from manyformer.base.errors import UserError
from manyformer.base.files.atomic_files import append_bytes, atomic_write_bytes, atomic_write_text
from manyformer.base.files.json_records import DamagedFile, parse_json, validate_json
from manyformer.base.files.json_text import json_text
from manyformer.base.type_aliases import LogFn
from manyformer.config import RunConfig

MetricsRow = dict[str, Any]
DAMAGED_ROWS = "metrics.damaged"
_COUNTS = ("step", "tokens", "seconds")
TIME_COLUMNS = ("seconds", "tokens_per_second", "data_wait")
"""What depends on the clock, and differs between two equal runs."""
_COUNT_COLUMNS = ("step", "tokens", "epoch", "seconds")
_TRAINING_COLUMNS = ("loss", "extra", "learning_rate", "gradient_norm", "tokens_per_second", "data_wait")
_VALIDATION_COLUMNS = ("valid_loss", "valid_accuracy", "valid_perplexity", "valid_bits_per_byte")
COLUMNS = (*_COUNT_COLUMNS, *_TRAINING_COLUMNS, *_VALIDATION_COLUMNS)

PROJECT = "manyformer"
"""The project of Weights & Biases and the experiment of MLflow that all runs belong to."""

_MLFLOW_BATCH = 100
"""MLflow takes so many parameters at once."""


class MetricsSink(Protocol):
    """Receives rows of metrics."""

    def add(self, row: MetricsRow) -> None: ...
    def close(self) -> None: ...


class MetricsFiles:
    """Appends rows to metrics.jsonl and metrics.csv; on resuming, only the first `rows` rows are retained.

    `scores` are the columns of scores; those that are not among the usual ones come last. Damaged rows are
    named in the log and moved to metrics.damaged; missing ones are counted. `rows_sum` is the sum of the first `rows`
    rows, if it is known.
    """

    def __init__(
        self, folder: Path, *, rows: int, log: LogFn, rows_sum: str | None = None, scores: Iterable[str] = ()
    ) -> None:
        self._jsonl = folder / "metrics.jsonl"
        self._csv = folder / "metrics.csv"
        self._columns = tuple(dict.fromkeys([*COLUMNS, *scores]))
        # rows after the checkpoint come again, with the steps that are repeated
        retained = self._retain(rows, log)
        if rows_sum not in (None, functools.reduce(extend_sum, retained, "")) and len(retained) == rows:
            log(f"{self._jsonl} is not as it was written: a number in its first {rows:,} rows differs")
        atomic_write_text(self._jsonl, "".join(json_text(row, ensure_ascii=True) + "\n" for row in retained))
        atomic_write_text(self._csv, "".join([",".join(self._columns) + "\n", *map(self._csv_line, retained)]))

    def _retain(self, rows: int, log: LogFn) -> list[MetricsRow]:
        """The first `rows` rows, without those that are damaged."""
        lines = list(itertools.islice(_read_lines(self._jsonl), rows))
        damaged = [line for line in lines if isinstance(line.row, DamagedFile)]
        for line in damaged:
            log(f"{line.row}; it is now in {DAMAGED_ROWS}")
        if damaged:
            content = b"".join(line.text for line in damaged)
            atomic_write_bytes(self._jsonl.parent / DAMAGED_ROWS, content)
        if len(lines) < rows:
            log(f"{self._jsonl} has {len(lines):,} rows, {rows:,} were written: {rows - len(lines):,} are missing")
        return [line.row for line in lines if not isinstance(line.row, DamagedFile)]

    def add(self, row: MetricsRow) -> None:
        """Append a row and flush it."""
        assert set(row) <= set(self._columns), f"no column for {set(row) - set(self._columns)}"
        append_bytes(self._jsonl, f"{json_text(row, ensure_ascii=True)}\n".encode())
        append_bytes(self._csv, self._csv_line(row).encode())

    def _csv_line(self, row: MetricsRow) -> str:
        # numbers and empty cells only: nothing to quote
        return ",".join("" if row.get(column) is None else str(row[column]) for column in self._columns) + "\n"

    def close(self) -> None:
        """Nothing to close: every row is written by `add`."""


def finite_row(row: MetricsRow) -> MetricsRow:
    """The row with None for numbers that are not finite, which JSON does not have."""
    return {name: value if value is not None and math.isfinite(value) else None for name, value in row.items()}


def extend_sum(rows_sum: str, row: MetricsRow) -> str:
    """A hash of the rows with the sum `rows_sum` and one more, without the columns that no two runs have in common."""
    # sorted, so that the order of columns does not matter
    numbers = json_text(
        {name: value for name, value in row.items() if name not in TIME_COLUMNS}, sort_keys=True, ensure_ascii=True
    )
    return hashlib.sha256(f"{rows_sum}{numbers}".encode()).hexdigest()[:16]


def read_rows(path: Path) -> Iterator[MetricsRow]:
    """Yield the rows of a metrics.jsonl; the last one may be truncated by a kill. Raises DamagedFile for others."""
    for line in _read_lines(path):
        if isinstance(line.row, DamagedFile):
            raise DamagedFile(f"{line.row}; the command that trains the run sets such rows aside")
        yield line.row


class _MetricsLine(NamedTuple):
    text: bytes
    row: MetricsRow | DamagedFile


def _read_lines(path: Path) -> Iterator[_MetricsLine]:
    """Yield the lines of a metrics.jsonl, but not a last one that is truncated."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        for number, text in enumerate(file, start=1):
            location = f"{path}:{number}"
            try:
                content = parse_json(text, location, "a row of metrics")
                row: MetricsRow = validate_json(content, dict[str, int | float | None], location)
                if missing := [name for name in _COUNTS if row.get(name) is None]:
                    raise DamagedFile(f"{location} is damaged: {missing[0]} is missing")
                yield _MetricsLine(text, row)
            except DamagedFile as damage:
                # no proper prefix of an object is valid JSON: a row that parses is complete even without its line end
                if text.endswith(b"\n"):
                    yield _MetricsLine(text, damage)


class TensorBoardTracker:
    """Writes event files in the folder `tensorboard` of the run."""

    def __init__(self, run: RunConfig, folder: Path, *, last_step: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise missing_library("tensorboard", "track") from error
        # TensorBoard hides rows after the checkpoint that the run resumes from
        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=last_step + 1)

    def add(self, row: MetricsRow) -> None:
        for name, value in scalars(row):
            self._writer.add_scalar(name, value, row["step"])
        # a kill must not lose rows that have already been displayed
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbTracker:
    """Writes a run of Weights & Biases to the folder `wandb` of the run; nothing is sent unless WANDB_MODE says so."""

    def __init__(self, run: RunConfig, folder: Path, *, last_step: int) -> None:
        try:
            import wandb
        except ImportError as error:
            raise missing_library("wandb", "wandb") from error
        self._run = wandb.init(
            project=PROJECT,
            name=folder.name,
            dir=str(folder),
            id=stored_id(folder / "wandb.id", lambda: uuid.uuid4().hex),
            resume="allow",
            config=run.model_dump(mode="json", by_alias=True),
            mode=os.environ.get("WANDB_MODE", "offline"),
            settings=wandb.Settings(silent=True),
        )

    def add(self, row: MetricsRow) -> None:
        self._run.log(dict(scalars(row)), step=row["step"])

    def close(self) -> None:
        self._run.finish()


class MLflowTracker:
    """Writes a run of MLflow to the store of MLFLOW_TRACKING_URI, or else to `mlflow.db` in the folder of the run."""

    def __init__(self, run: RunConfig, folder: Path, *, last_step: int) -> None:
        try:
            from mlflow.entities import Metric, Param
            from mlflow.exceptions import MlflowException
            from mlflow.tracking import MlflowClient
        except ImportError as error:
            raise missing_library("mlflow", "mlflow") from error
        self._metric = Metric
        store = os.environ.get("MLFLOW_TRACKING_URI", f"sqlite:///{(folder / 'mlflow.db').resolve()}")
        try:
            self._client = MlflowClient(store)
            params = [Param(name, value) for name, value in flat_settings(run.model_dump(mode="json", by_alias=True))]
            self._id = stored_id(folder / "mlflow.id", lambda: self._create_run(folder.name, params))
        except MlflowException as error:
            raise UserError(f"trackers: MLflow cannot use {store}: {error}") from error

    def _create_run(self, name: str, params: Sequence[Any]) -> str:
        # all runs share one experiment, which the first of them creates
        experiment = self._client.get_experiment_by_name(PROJECT)
        if experiment is None:
            experiment_id = self._client.create_experiment(PROJECT)
        else:
            experiment_id = experiment.experiment_id
        run_id = str(self._client.create_run(experiment_id, run_name=name).info.run_id)
        for start in range(0, len(params), _MLFLOW_BATCH):
            self._client.log_batch(run_id, params=params[start : start + _MLFLOW_BATCH])
        return run_id

    def add(self, row: MetricsRow) -> None:
        milliseconds = round(1000 * time.time())
        self._client.log_batch(
            self._id, [self._metric(name, value, milliseconds, row["step"]) for name, value in scalars(row)]
        )

    def close(self) -> None:
        self._client.set_terminated(self._id)


TRACKERS: dict[str, Callable[..., MetricsSink]] = {
    "tensorboard": TensorBoardTracker,
    "wandb": WandbTracker,
    "mlflow": MLflowTracker,
}
"""The trackers by their names in `trackers`."""


def open_trackers(run: RunConfig, folder: Path, *, last_step: int) -> list[MetricsSink]:
    """The trackers of a run that goes on after `last_step`. Raises UserError if a library is missing."""
    return [TRACKERS[name](run, folder, last_step=last_step) for name in run.trackers]


def missing_library(library: str, extra: str) -> UserError:
    """The error for a tracker without its library."""
    return UserError(f'trackers: {library} needs one more library: pip install "manyformer[{extra}]"')


def scalars(row: MetricsRow) -> Iterator[tuple[str, int | float]]:
    """The numbers of a row of metrics by their names, such as `train/loss` and `valid/loss`."""
    for name, value in row.items():
        if name != "step" and isinstance(value, int | float):
            group = "valid" if name.startswith("valid_") else "train"
            yield f"{group}/{name.removeprefix('valid_')}", value


def flat_settings(settings: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """The settings of a run by their names on the command line, as text."""
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from flat_settings(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", str(value)


def stored_id(file: Path, create: Callable[[], str]) -> str:
    """The id of a tracker's run in a file, which a run that is resumed goes on with. Raises DamagedFile."""
    if not file.is_file():
        atomic_write_text(file, create() + "\n")
    text = file.read_text(encoding="utf-8", errors="replace").strip()
    # both libraries use ids of this form, and would begin a run under any other text
    if not re.fullmatch(r"[0-9a-f]{32}", text):
        raise DamagedFile(f"{file} is damaged: it has no id of 32 hexadecimal digits; remove it to track a new run")
    return text
