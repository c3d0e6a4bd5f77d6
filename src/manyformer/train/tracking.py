"""Trackers: the rows of metrics of a run in TensorBoard, Weights & Biases or MLflow, through their own libraries."""

import os
import re
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from manyformer.config import RunConfig
from manyformer.errors import UserError
from manyformer.files.atomic_files import atomic_write_text
from manyformer.files.json_records import DamagedFile
from manyformer.train.metrics import MetricsRow
from manyformer.train.training_loop import MetricsSink

PROJECT = "manyformer"
"""The project of Weights & Biases and the experiment of MLflow that all runs belong to."""

_MLFLOW_BATCH = 100
"""MLflow takes so many parameters at once."""


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
        now = round(1000 * time.time())
        self._client.log_batch(self._id, [self._metric(name, value, now, row["step"]) for name, value in scalars(row)])

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
    if not re.fullmatch(r"[0-9a-f]{32}", text):
        raise DamagedFile(f"{file} is damaged: it has no id of 32 hexadecimal digits; remove it to track a new run")
    return text
