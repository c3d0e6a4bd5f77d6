"""The trainings of a comparison: which are to be done, in which folders, and which have been measured already."""

import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from manyformer.compare.comparison_report import ComparisonResult
from manyformer.compare.measurement import ArchivedMeasurement, CaseMeasurement, MeasurementArchive
from manyformer.compare.scoring import score_kind
from manyformer.compare.training_task import TrainingTask, content_hash, run_settings, training_hash, with_source
from manyformer.config import RUN_FILE, RunConfig
from manyformer.config.comparison import Comparison, ComparisonCase
from manyformer.data.synthetic_floors import GuessFloors
from manyformer.errors import UserError
from manyformer.scores import rank_key
from manyformer.train.run_folder import as_run
from manyformer.version import VERSION


class TrainingJob(NamedTuple):
    """A trial of a case, by its number, with the seed of index `seed`."""

    case: str
    trial: int
    seed: int


class ComparisonRunner:
    """The trainings of a comparison in subfolders of `folder`; existing measurements are reused.

    With an archive, measurements are also looked for and added there, and the folder of a training is removed once it
    and those that start from its weights are measured."""

    def __init__(
        self, comparison: Comparison, folder: Path, seeds: int, archive: MeasurementArchive | None = None
    ) -> None:
        self.comparison = comparison
        self.folder = folder
        self.seeds = seeds
        self.archive = archive
        self._folders = _folder_names([case.name for case in comparison.cases])
        self._measured: dict[TrainingJob, CaseMeasurement] = {}
        self._missing: set[TrainingJob] = set()
        stage = comparison.stage
        self._cases = sorted(comparison.cases, key=lambda case: (case.trained_by is not None, stage(case)))

    def known_jobs(self) -> Iterator[TrainingJob]:
        """All jobs, seed by seed, in the order in which they depend on each other; the trials of a case come first.

        Those with the other seeds are known once the best trial is."""
        for seed in range(self.seeds):
            for case in self._cases:
                yield from self._jobs_of(case, seed)

    def ready_jobs(self) -> Iterator[TrainingJob]:
        """The jobs without a measurement whose weights to start from are there."""
        for job in self.known_jobs():
            is_finished = self.measurement(job) is not None and (
                self.archive is None or not self._needs_weights(job) or self._has_weights(job)
            )
            if not is_finished and self._is_ready(job):
                yield job

    def count_missing(self) -> int:
        """The number of trainings without a measurement."""
        return sum(map(self.count_missing_of, self.comparison.cases))

    def count_missing_of(self, case: ComparisonCase) -> int:
        """The number of trainings of a case without a measurement; its best trial may not be known yet."""
        if case.trained_by is not None:
            return 0
        missing = sum(self.measurement(job) is None for job in self._jobs_of(case, 0))
        if self.best_trial(case) is None:
            return missing + self.seeds - 1
        return missing + sum(self.measurement(job) is None for job in self._best_jobs(case)[1:])

    def best_trial(self, case: ComparisonCase) -> int | None:
        """The number of the trial with the best first score on the validation data; None until all are measured."""
        if case.trained_by is not None:
            return self.best_trial(self.comparison.case(case.trained_by))
        if len(case.trials) == 1:
            return 0
        selected = [measurement.selection for measurement in self._measured_of(self._jobs_of(case, 0))]
        if len(selected) < len(case.trials):
            return None
        lower_is_better = score_kind(self.comparison.file.score[0]).lower_is_better
        # a trial that diverged has no score, or one that is not finite
        return min(range(len(selected)), key=lambda trial: rank_key(selected[trial], lower_is_better=lower_is_better))

    def _jobs_of(self, case: ComparisonCase, seed: int) -> list[TrainingJob]:
        """The jobs of a case with the seed of this index: all trials with the first, else the best; none before it is
        known."""
        if seed == 0 and case.trained_by is None:
            return [TrainingJob(case.name, trial, 0) for trial in range(len(case.trials))]
        best = self.best_trial(case)
        if best is None:
            return []
        return [TrainingJob(case.name, best, seed)]

    def _best_jobs(self, case: ComparisonCase) -> list[TrainingJob]:
        """The jobs of the best trial of a case with all seeds; none before it is known."""
        best = self.best_trial(case)
        if best is None:
            return []
        return [TrainingJob(case.name, best, seed) for seed in range(self.seeds)]

    def _measured_of(self, jobs: Iterable[TrainingJob]) -> list[CaseMeasurement]:
        """The measurements of jobs, as far as they are there."""
        return [measurement for job in jobs if (measurement := self.measurement(job)) is not None]

    def measurement(self, job: TrainingJob) -> CaseMeasurement | None:
        """The measurement of a job, if there is one."""
        if job in self._missing:
            return None
        if job not in self._measured:
            if self._case(job).init_from_case is not None and self._source(job) is None:
                return None  # the weights that it starts from are not chosen yet
            task = self.task(job)
            entry = None
            if self.archive:
                entry = self.archive.entries.get(task.key)
            measurement = task.load() or (entry.measurement if entry else None)
            if measurement is None or not task.is_answered_by(measurement):
                # files are read once: others are only added by `add`
                self._missing.add(job)
                return None
            self._measured[job] = measurement
        return self._measured[job]

    def add(self, job: TrainingJob, measurement: CaseMeasurement, machine: str, date: str) -> None:
        """Take the measurement of a job that has been carried out, and archive it."""
        self._measured[job] = measurement
        self._missing.discard(job)
        if self.archive is None:
            return
        task = self.task(job)
        settings = run_settings(task.run)
        self.archive.add(
            ArchivedMeasurement(task.key, self.comparison.name, settings, measurement, machine, VERSION, date)
        )
        # the weights of a trial are kept until it is known not to be the best
        for finished in {job, self._source(job), *self._jobs_of(self._case(job), 0)}:
            if finished in self._measured and not self._needs_weights(finished):
                shutil.rmtree(self.folder_of(finished), ignore_errors=True)

    def result(self, machine: str = "", guesses: GuessFloors | None = None) -> ComparisonResult:
        """What is measured: the best trial of every case with all seeds, and the trials of cases that have several."""
        cases = self.comparison.cases
        tried = [case for case in cases if len(case.trials) > 1 and case.trained_by is None]
        return ComparisonResult(
            self.comparison,
            self.seeds,
            tuple(self._measured_of(job for case in cases for job in self._best_jobs(case))),
            machine=machine,
            trials=tuple(self._measured_of(job for case in tried for job in self._jobs_of(case, 0))),
            guesses=guesses,
        )

    def check(self) -> None:
        """Raise UserError if a folder contains a training with different settings."""
        for job in self.known_jobs():
            case = self._case(job)
            file = self.folder_of(job) / RUN_FILE
            if case.trained_by is not None or not file.is_file():
                continue
            if training_hash(case, as_run(file)) != training_hash(case, self.run(job)):
                raise UserError(
                    f"{file.parent} was trained with other settings or another budget, those of {file}; choose another "
                    "--out, or start over with --fresh"
                )

    def task(self, job: TrainingJob) -> TrainingTask:
        """All that a process needs to carry out the job."""
        case = self._case(job)
        run = self.run(job)
        if case.trained_by is None:
            trained = run
        else:
            trained = self.run(self._trained(job))
        points = tuple(None if point is None else self._at_seed(job, point) for point in case.trials[job.trial].points)
        file = self.comparison.file
        values = self.comparison.values
        selects = job.seed == 0 and len(case.trials) > 1 and case.trained_by is None
        label = case.trials[job.trial].label
        key = self._measurement_key(job)
        folder = self.folder_of(job)
        return TrainingTask(
            case.name, label, run, trained, points, values, file.score, file.split, selects, folder, key
        )

    def run(self, job: TrainingJob) -> RunConfig:
        """The run of a job, in a folder of its own."""
        run = self._at_seed(job, self._case(job).trials[job.trial].run)
        return run.model_copy(update={"out": str(self.folder_of(job))})

    def folder_of(self, job: TrainingJob) -> Path:
        """The folder of a job's run."""
        if self.archive is not None:
            return self.folder / "trainings" / self._measurement_key(job)
        case = self._case(job)
        trial = case.trials[job.trial].label
        folder = self.folder / self._folders[case.name] / _slug(trial, "a-z0-9.")
        return folder / f"seed-{case.run.seed + job.seed}"

    def _case(self, job: TrainingJob) -> ComparisonCase:
        return self.comparison.case(job.case)

    def _trained(self, job: TrainingJob) -> TrainingJob:
        """The job that trains the weights of another one's case."""
        trainer = self._case(job).trained_by
        assert trainer is not None
        return job._replace(case=trainer)

    def _source(self, job: TrainingJob) -> TrainingJob | None:
        """The job whose weights it starts from; None if there is none, or its best trial is not known yet."""
        source = self._case(job).init_from_case
        if source is None or (trial := self.best_trial(self.comparison.case(source))) is None:
            return None
        return TrainingJob(source, trial, job.seed)

    def _is_ready(self, job: TrainingJob) -> bool:
        """Whether the weights that a job needs are there."""
        case = self._case(job)
        if case.trained_by is not None:
            return self._has_weights(self._trained(job))
        if case.init_from_case is not None:
            return (source := self._source(job)) is not None and self._has_weights(source)
        return True

    def _has_weights(self, job: TrainingJob) -> bool:
        return self.measurement(job) is not None and (self.folder_of(job) / "model").is_dir()

    def _needs_weights(self, job: TrainingJob) -> bool:
        """Whether a job without a measurement uses or starts from the weights of this one."""
        best = self.best_trial(self._case(job))
        if best is not None and best != job.trial:
            return False
        users = [case for case in self.comparison.cases if job.case in (case.trained_by, case.init_from_case)]
        jobs_of_users = [self._jobs_of(case, job.seed) for case in users]
        return any(not jobs or None in map(self.measurement, jobs) for jobs in jobs_of_users)

    def _at_seed(self, job: TrainingJob, run: RunConfig) -> RunConfig:
        """A run of the job's case with the seed of the job, and the folder of the training that it begins with."""
        case = self._case(job)
        seeded = run.model_copy(update={"seed": case.run.seed + job.seed})
        source = self._source(job)
        if case.init_from_case is None or source is None:
            return seeded
        return with_source(seeded, case.init_from_case, str(self.folder_of(source)))

    def _measurement_key(self, job: TrainingJob) -> str:
        """A hash of all that a measurement depends on: the run, its scores and the settings of scoring."""
        case = self._case(job)
        trained = None
        if case.trained_by is not None:
            trained = self._training_key(self._trained(job))
        points = [None if point is None else run_settings(point) for point in case.trials[job.trial].points]
        file = self.comparison.file
        return content_hash([self._training_key(job), trained, points, file.score, file.split])

    def _training_key(self, job: TrainingJob) -> Any:
        """A hash of the training, and of the trainings whose weights it starts from."""
        case = self._case(job)
        run = case.trials[job.trial].run
        key = training_hash(case, run.model_copy(update={"seed": case.run.seed + job.seed}))
        source = self._source(job)
        if source is None:
            return key
        return [self._training_key(source), key]


def _slug(name: str, characters: str) -> str:
    """A folder name of these characters, and hyphens in the place of others."""
    return re.sub(rf"[^{characters}]+", "-", name.lower()).strip("-.")


def _folder_names(cases: list[str]) -> dict[str, str]:
    """A unique folder name of letters, digits and hyphens for each case."""
    names: dict[str, str] = {}
    for case in cases:
        slug = _slug(case, "a-z0-9") or "case"
        suffix = 1
        name = slug
        while name in names.values():
            suffix, name = suffix + 1, f"{slug}-{suffix + 1}"
        names[case] = name
    return names
