"""Runs a comparison: trains and scores every case with every seed, and saves each measurement at once."""

import hashlib
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from manyformer.compare.comparison_report import CaseMeasurement
from manyformer.compare.progress import ProgressMeter
from manyformer.compare.scoring import Rescorer, RescoreResult
from manyformer.config import RUN_FILE, EncodedTextData, RunConfig
from manyformer.config.comparison import Comparison, ComparisonCase
from manyformer.errors import UserError
from manyformer.files.json_records import DamagedFile, FileRecord
from manyformer.model_summary import count_parameters
from manyformer.train import TrainingDiverged, train
from manyformer.train.metrics import read_rows
from manyformer.train.run_folder import as_run

MEASUREMENT_FILE = "measured.json"

IGNORED_SECTIONS = {"out", "log", "save", "trackers", "device", "imports", "process_timeout"}
"""Sections of a run that do not affect its measurement."""


class MeasurementRecord(FileRecord):
    """The measurement of a case with one seed, and a hash of all that it depends on."""

    title = "the measurement of a comparison"
    key: str
    measurement: CaseMeasurement


class ComparisonRunner:
    """Trains and scores the cases in subfolders of `folder`; existing measurements are reused."""

    def __init__(self, comparison: Comparison, folder: Path, seeds: int) -> None:
        self.comparison, self.folder, self.seeds = comparison, folder, seeds
        self._folders = _folder_names([case.name for case in comparison.cases])

    def measure_all(self, meter: ProgressMeter) -> Iterator[CaseMeasurement]:
        """Measure all cases, seed by seed, in the order in which they depend on each other."""
        stage = self.comparison.stage
        cases = sorted(self.comparison.cases, key=lambda case: (case.trained_by is not None, stage(case)))
        for seed in range(self.seeds):
            for case in cases:
                yield self._load_measurement(case, seed) or self._measure(case, seed, meter)

    def check(self) -> None:
        """Raise UserError if a folder contains a training with different settings."""
        for case, seed in self._trainings():
            file = self.folder_of(case, seed) / RUN_FILE
            if file.is_file() and _training_hash(case, as_run(file)) != _training_hash(case, self.run(case, seed)):
                raise UserError(
                    f"{file.parent} was trained with other settings or another budget, those of {file}; choose another "
                    "--out, or start over with --fresh"
                )

    def count_missing(self) -> int:
        """The number of trainings without a measurement."""
        return sum(self._load_measurement(case, seed) is None for case, seed in self._trainings())

    def run(self, case: ComparisonCase, seed: int) -> RunConfig:
        """The run of a case with the seed of index `seed`, in a separate folder."""
        return self._at_seed(case, case.run, seed).model_copy(update={"out": str(self.folder_of(case, seed))})

    def _at_seed(self, case: ComparisonCase, run: RunConfig, seed: int) -> RunConfig:
        """A run of the case with the seed of index `seed`, and the folder of the case that it begins with."""
        seeded = run.model_copy(update={"seed": case.run.seed + seed})
        if case.init_from_case is None:
            return seeded
        source = self.folder_of(self.comparison.case(case.init_from_case), seed)
        return _renamed_source(seeded, case.init_from_case, str(source))

    def folder_of(self, case: ComparisonCase, seed: int) -> Path:
        """The folder of a case's run with the seed of index `seed`."""
        return self.folder / self._folders[case.name] / f"seed-{case.run.seed + seed}"

    def _trainings(self) -> Iterator[tuple[ComparisonCase, int]]:
        cases = [case for case in self.comparison.cases if case.trained_by is None]
        return itertools.product(cases, range(self.seeds))

    def _measure(self, case: ComparisonCase, seed: int, meter: ProgressMeter) -> CaseMeasurement:
        run, name = self.run(case, seed), f"{case.name}, seed {case.run.seed + seed}"
        trainer = case if case.trained_by is None else self.comparison.case(case.trained_by)
        trained, folder = self.run(trainer, seed), self.folder_of(trainer, seed)
        try:
            if trainer is case:
                train(run, on_event=meter.listener(name))
            scorer = Rescorer(folder, trained, self.comparison.file.score, self.comparison.file.split)
            results = list(self._score(scorer, case, name, seed, meter))
            parameters = count_parameters(scorer.model)
        except TrainingDiverged as error:
            # a divergence is a result too: dashes with the reason
            no_scores = dict.fromkeys(self.comparison.file.score)
            results, parameters = [RescoreResult(no_scores, f"seed {run.seed}: {error}")] * len(case.points), None
        scores, reasons = tuple(result.scores for result in results), tuple(result.reason for result in results)
        rows = list(read_rows(folder / "metrics.jsonl"))
        last = rows[-1] if rows else {"step": 0, "tokens": 0}
        minutes = last["seconds"] / 60 if rows and trainer is case else None
        effort = minutes, last["step"], last["tokens"]
        measurement = CaseMeasurement(case.name, run.seed, scores, reasons, *effort, parameters)
        self._save_measurement(case, seed, measurement)
        if trainer is case:
            meter.finish_training(f"{name}: {self._format_scores(measurement)}")
        return measurement

    def _score(
        self, scorer: Rescorer, case: ComparisonCase, name: str, seed: int, meter: ProgressMeter
    ) -> Iterator[RescoreResult]:
        for value, point in zip(self.comparison.values, case.points, strict=True):
            meter.report_progress(f"{name}: scoring" + ("" if value is None else f" at {value}"), 1.0)
            yield scorer(None if point is None else self._at_seed(case, point, seed))

    def _format_scores(self, measurement: CaseMeasurement) -> str:
        score = self.comparison.file.score[0]
        values = [scores[score] for scores in measurement.scores]
        return f"{score} {', '.join('none' if value is None else f'{value:.4g}' for value in values)}"

    def _load_measurement(self, case: ComparisonCase, seed: int) -> CaseMeasurement | None:
        """The saved measurement, if it is of exactly the same run, scores and settings. Raises DamagedFile."""
        file = self.folder_of(case, seed) / MEASUREMENT_FILE
        if not file.exists():
            return None
        try:
            record = MeasurementRecord.read(file)
        except DamagedFile as damage:
            raise DamagedFile(f"{damage}; remove it, and the trained model is measured again") from None
        return record.measurement if record.key == self._measurement_key(case, seed) else None

    def _save_measurement(self, case: ComparisonCase, seed: int, measurement: CaseMeasurement) -> None:
        record = MeasurementRecord(key=self._measurement_key(case, seed), measurement=measurement)
        record.write(self.folder_of(case, seed) / MEASUREMENT_FILE)

    def _measurement_key(self, case: ComparisonCase, seed: int) -> str:
        """A hash of all that a measurement depends on: the run, its scores and the settings of scoring."""
        trained = None if case.trained_by is None else self._training_key(self.comparison.case(case.trained_by), seed)
        points = [None if point is None else _run_hash(point) for point in case.points]
        file = self.comparison.file
        return _hash([self._training_key(case, seed), trained, points, file.score, file.split])

    def _training_key(self, case: ComparisonCase, seed: int) -> Any:
        """A hash of the training, and of the trainings whose weights it starts from."""
        key = _training_hash(case, self.run(case, seed))
        if case.init_from_case is None:
            return key
        return [self._training_key(self.comparison.case(case.init_from_case), seed), key]


def _training_hash(case: ComparisonCase, run: RunConfig) -> str:
    """A hash of the run with the name of the case whose weights it starts from, instead of that case's folder."""
    origin = case.init_from_case
    return _run_hash(run if origin is None else _renamed_source(run, run.init_from, origin))


def _renamed_source(run: RunConfig, old: str | None, new: str) -> RunConfig:
    """The run with `new` as `init_from`, and as `data.tokenizer_of` where that was `old` as well."""
    data = run.data
    if isinstance(data, EncodedTextData) and data.tokenizer_of == old:
        data = data.model_copy(update={"tokenizer_of": new})
    return run.model_copy(update={"init_from": new, "data": data})


def _run_hash(run: RunConfig) -> str:
    # measurements from before there was such a section stay valid
    unused = set() if run.transfer.steps is not None else {"transfer"}
    return _hash(run.model_dump(mode="json", exclude=IGNORED_SECTIONS | unused))


def _hash(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:24]


def _folder_names(cases: list[str]) -> dict[str, str]:
    """A unique folder name of letters, digits and hyphens for each case."""
    names: dict[str, str] = {}
    for case in cases:
        slug = re.sub(r"[^a-z0-9]+", "-", case.lower()).strip("-") or "case"
        suffix, name = 1, slug
        while name in names.values():
            suffix, name = suffix + 1, f"{slug}-{suffix + 1}"
        names[case] = name
    return names
