"""One training of a comparison with its scores: what a process needs to carry it out alone, and what it measures.

Measurements are kept in the file of a run, and in an archive that other machines can read and continue."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ConfigDict

from manyformer.analysis.benchmarks.measuring import extra_memory, median_with_quartiles, take_turns
from manyformer.analysis.comparisons.scoring import Rescorer, RescoreResult
from manyformer.base.errors import UserError
from manyformer.base.files.json_records import DamagedFile, FileRecord, JsonLines
from manyformer.base.files.json_text import json_text
from manyformer.config import EncodedTextData, RunConfig
from manyformer.config.comparison import ComparisonCase
from manyformer.recipes.parts.model_summary import count_parameters
from manyformer.training import TrainingDiverged, train
from manyformer.training.events import TrainingEvent, TrainingProgress
from manyformer.training.metrics import read_rows
from manyformer.training.step_job import step_of_run

ROUNDS = 7
"""How many times each case's step is timed."""

MEASUREMENT_FILE = "measured.json"

IGNORED_SECTIONS = {"out", "log", "save", "trackers", "device", "imports", "process_timeout"}
"""Sections of a run that do not affect its measurement."""

ReportActivity = Callable[[str, float], None]
"""Called with what is done at present, and the completed share of the current training."""


@dataclass(frozen=True)
class CaseMeasurement:
    """The measurement of a case with one seed: scores for each value of the sweep, or the reason why one is missing.

    `trial` names the trial of the case that was trained, and `selection` is its first score on the validation data, by
    which the best trial is chosen; they are empty and None for a case without trials."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    case: str
    seed: int
    scores: tuple[dict[str, float | None], ...]
    reasons: tuple[str | None, ...]
    minutes: float | None
    steps: int
    tokens: int
    parameters: int | None
    trial: str = ""
    selection: float | None = None


class CaseFailure(NamedTuple):
    """A training that has failed, and the error; its case has no mean until the training is repeated."""

    case: str
    name: str
    error: Exception

    @property
    def reason(self) -> str:
        """The error in words."""
        if isinstance(self.error, UserError):
            return str(self.error)
        return f"{type(self.error).__name__}: {self.error}"


class MeasurementRecord(FileRecord):
    """The measurement of a case with one seed, and a hash of all that it depends on."""

    title = "the measurement of a comparison"
    key: str
    measurement: CaseMeasurement


@dataclass(frozen=True)
class ArchivedMeasurement:
    """A measurement with the hash of all that it depends on, and where and when it was made.

    `settings` are those of the run that differ from the defaults, for people: the hash alone decides."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    key: str
    comparison: str
    settings: dict[str, Any]
    measurement: CaseMeasurement
    machine: str
    version: str
    date: str


MeasurementArchive = JsonLines[ArchivedMeasurement]
"""A file of measurements that any checkout and machine can read and continue."""


def open_archive(path: Path) -> MeasurementArchive:
    """The archive in a file, empty where there is none. Raises DamagedFile."""
    return JsonLines(path, ArchivedMeasurement, "a line of an archive of measurements")


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
            # the model is still there, so that only the scoring is repeated
            raise DamagedFile(f"{damage}; remove it, and the trained model is measured again") from None
        if record.key == self.key and self.is_answered_by(record.measurement):
            return record.measurement
        return None

    def is_answered_by(self, measurement: CaseMeasurement) -> bool:
        """Whether a measurement has all that the task asks for; one of a training that diverged has no scores."""
        return not self.selects or measurement.selection is not None or measurement.parameters is None

    def measure(self, report: ReportActivity = lambda activity, share: None) -> CaseMeasurement:
        """Train, or resume, and score the model; the measurement is saved at once."""

        def on_event(event: TrainingEvent) -> None:
            if isinstance(event, TrainingProgress):
                report(f"{self.name}: step {event.step}, loss {event.loss:.3f}", event.progress)

        assert self.trained.out is not None
        trained_folder = Path(self.trained.out)
        selection = None
        try:
            # a case with the weights of another is only scored
            if self.trains:
                train(self.run, on_event=on_event)
            scorer = Rescorer(trained_folder, self.trained, self.scores, self.split)
            results = list(self._score(scorer, report))
            # of the model as it was trained: a point of the sweep may have other keywords
            parameters = count_parameters(scorer.model)
            if self.selects:
                main_score = self.scores[0]
                validation = Rescorer(trained_folder, self.trained, [main_score], "valid")
                selection = validation(self.run).scores[main_score]
        except TrainingDiverged as error:
            # a divergence is a result too: dashes with the reason
            no_scores = dict.fromkeys(self.scores)
            reason = f"seed {self.run.seed}: {error}"
            results = [RescoreResult(no_scores, reason)] * len(self.points)
            parameters = None
        measurement = self._measurement(trained_folder, results, parameters, selection)
        MeasurementRecord(key=self.key, measurement=measurement).write(self.folder / MEASUREMENT_FILE)
        return measurement

    def _measurement(
        self, trained_folder: Path, results: Sequence[RescoreResult], parameters: int | None, selection: float | None
    ) -> CaseMeasurement:
        """The measurement with these scores, and with the time and the tokens of the training in a folder."""
        rows = list(read_rows(trained_folder / "metrics.jsonl"))
        last = rows[-1] if rows else {"step": 0, "tokens": 0}
        # minutes of a case that shares weights would be counted twice in the total
        minutes = None
        if rows and self.trains:
            minutes = last["seconds"] / 60
        return CaseMeasurement(
            case=self.case,
            seed=self.run.seed,
            scores=tuple(result.scores for result in results),
            reasons=tuple(result.reason for result in results),
            minutes=minutes,
            steps=last["step"],
            tokens=last["tokens"],
            parameters=parameters,
            trial=self.trial,
            selection=selection,
        )

    def _score(self, scorer: Rescorer, report: ReportActivity) -> Iterator[RescoreResult]:
        for value, point in zip(self.values, self.points, strict=True):
            report(f"{self.name}: scoring" + ("" if value is None else f" at {value}"), 1.0)
            yield scorer(point)


class StepCost(NamedTuple):
    """The cost of a training step: the median time in seconds, and the peak extra memory in bytes if measurable."""

    seconds: float
    memory: int | None


def measure_steps(runs: Mapping[str, tuple[RunConfig, Path]], rounds: int = ROUNDS) -> dict[str, StepCost]:
    """Measure a training step of each run on a batch of its data; the path is the run's folder."""
    # all are built before the first is timed, because they take turns
    jobs = {name: step_of_run(run, folder) for name, (run, folder) in runs.items()}
    device = next(iter(jobs.values())).engine.device
    for job in jobs.values():
        job()
    memories = {name: extra_memory(job, device) for name, job in jobs.items()}
    times = take_turns(jobs, rounds, device)
    return {name: StepCost(median_with_quartiles(times[name]).median, memories[name]) for name in jobs}


def run_settings(run: RunConfig) -> dict[str, Any]:
    """The settings that affect a measurement, without those that have their defaults.

    A setting that is added later, whose default changes nothing, leaves measurements valid."""
    # what selects a section's class has a default too, but decides what the other defaults are
    kinds = {"data": run.data.model_dump(include={"kind", "rule"})}
    kinds |= {"optim": {"name": run.optim.name}, "schedule": {"name": run.schedule.name}}
    settings = run.model_dump(mode="json", exclude=IGNORED_SECTIONS, exclude_defaults=True)
    return settings | {section: settings.get(section, {}) | kind for section, kind in kinds.items()}


def training_hash(case: ComparisonCase, run: RunConfig) -> str:
    """A hash of the run with the name of the case whose weights it starts from, instead of that case's folder."""
    origin = case.init_from_case
    # a folder's path would make a measurement invalid on every other machine
    return content_hash(run_settings(run if origin is None else with_source(run, run.init_from, origin)))


def with_source(run: RunConfig, old: str | None, new: str) -> RunConfig:
    """The run with `new` as `init_from`, and as `data.tokenizer_of` where that was `old` as well."""
    data = run.data
    # a tokenizer that comes from the same run moves with it
    if isinstance(data, EncodedTextData) and data.tokenizer_of == old:
        data = data.model_copy(update={"tokenizer_of": new})
    return run.model_copy(update={"init_from": new, "data": data})


def content_hash(content: Any) -> str:
    """24 hexadecimal digits that stand for content which JSON can express."""
    return hashlib.sha256(json_text(content, sort_keys=True, ensure_ascii=True).encode()).hexdigest()[:24]
