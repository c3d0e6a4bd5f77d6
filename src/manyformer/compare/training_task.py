"""One training of a comparison with its scores: what a process needs to carry it out alone."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manyformer.compare.measurement import CaseMeasurement, MeasurementRecord
from manyformer.compare.progress import TaskProgress
from manyformer.compare.scoring import Rescorer, RescoreResult
from manyformer.config import RunConfig
from manyformer.files.json_records import DamagedFile
from manyformer.model_summary import count_parameters
from manyformer.train import TrainingDiverged, train
from manyformer.train.metrics import read_rows

MEASUREMENT_FILE = "measured.json"


@dataclass(frozen=True)
class TrainingTask:
    """The training of one trial of a case with one seed, and its scores under the runs of `points`.

    `trained` is the run of the weights, which is `run` unless the case uses those of another one; `folder` holds the
    measurement. `key` is a hash of all that the measurement depends on. With `selects` the first score is measured on
    the validation data too, to choose among the trials of the case."""

    case: str
    trial: str
    run: RunConfig
    trained: RunConfig
    points: tuple[RunConfig | None, ...]
    values: tuple[Any, ...]
    scores: tuple[str, ...]
    split: str
    selects: bool
    folder: Path
    key: str

    @property
    def name(self) -> str:
        """The case, the trial and the seed, for messages."""
        return f"{self.case}{self.trial and f', {self.trial}'}, seed {self.run.seed}"

    @property
    def trains(self) -> bool:
        """Whether the weights are trained by this task."""
        return self.run.out == self.trained.out

    def load(self) -> CaseMeasurement | None:
        """The saved measurement, if it is of exactly this task. Raises DamagedFile."""
        file = self.folder / MEASUREMENT_FILE
        if not file.exists():
            return None
        try:
            record = MeasurementRecord.read(file)
        except DamagedFile as damage:
            raise DamagedFile(f"{damage}; remove it, and the trained model is measured again") from None
        return record.measurement if record.key == self.key and self.is_answered_by(record.measurement) else None

    def is_answered_by(self, measurement: CaseMeasurement) -> bool:
        """Whether a measurement has all that the task asks for; one of a training that diverged has no scores."""
        return not self.selects or measurement.selection is not None or measurement.parameters is None

    def measure(self, progress: TaskProgress) -> CaseMeasurement:
        """Train, or resume, and score the model; the measurement is saved at once."""
        assert self.trained.out is not None
        trained_folder = Path(self.trained.out)
        selection = None
        try:
            if self.trains:
                train(self.run, on_event=progress.listener(self.name))
            scorer = Rescorer(trained_folder, self.trained, self.scores, self.split)
            results = list(self._score(scorer, progress))
            parameters = count_parameters(scorer.model)
            if self.selects:
                selection = Rescorer(trained_folder, self.trained, self.scores[:1], "valid")(self.run).scores[
                    self.scores[0]
                ]
        except TrainingDiverged as error:
            # a divergence is a result too: dashes with the reason
            no_scores = dict.fromkeys(self.scores)
            reason = f"seed {self.run.seed}: {error}"
            results, parameters = [RescoreResult(no_scores, reason)] * len(self.points), None
        scores, reasons = tuple(result.scores for result in results), tuple(result.reason for result in results)
        rows = list(read_rows(trained_folder / "metrics.jsonl"))
        last = rows[-1] if rows else {"step": 0, "tokens": 0}
        minutes = last["seconds"] / 60 if rows and self.trains else None
        effort = minutes, last["step"], last["tokens"]
        measurement = CaseMeasurement(
            self.case, self.run.seed, scores, reasons, *effort, parameters, self.trial, selection
        )
        MeasurementRecord(key=self.key, measurement=measurement).write(self.folder / MEASUREMENT_FILE)
        return measurement

    def _score(self, scorer: Rescorer, progress: TaskProgress) -> Iterator[RescoreResult]:
        for value, point in zip(self.values, self.points, strict=True):
            progress.report_progress(f"{self.name}: scoring" + ("" if value is None else f" at {value}"), 1.0)
            yield scorer(point)
