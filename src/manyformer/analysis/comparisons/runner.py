"""The trainings of comparisons: which are to be done, and carrying them out, in this process or in several at once.

`ComparisonRunner` knows the folders and what has been measured already; `run_jobs` trains what is missing."""

import multiprocessing
import os
import re
import shutil
import signal
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from datetime import date
from functools import partial
from multiprocessing.connection import wait as wait_for_sentinel
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from manyformer.analysis.comparisons.comparison_report import ComparisonResult
from manyformer.analysis.comparisons.scoring import score_kind
from manyformer.analysis.comparisons.training_task import (
    ArchivedMeasurement,
    CaseFailure,
    CaseMeasurement,
    MeasurementArchive,
    TrainingTask,
    content_hash,
    run_settings,
    training_hash,
    with_source,
)
from manyformer.base import VERSION
from manyformer.base.errors import TrainingInterrupted, UserError
from manyformer.base.files.atomic_files import NotWritable, atomic_write_text
from manyformer.base.plugins import import_modules
from manyformer.base.type_aliases import LogFn
from manyformer.config import RUN_FILE, RunConfig
from manyformer.config.comparison import Comparison, ComparisonCase
from manyformer.data.generated.synthetic_floors import GuessFloors
from manyformer.models.scores import rank_key
from manyformer.nn.runtime.devices import best_device, gpu_name
from manyformer.training.events import format_duration
from manyformer.training.run_folder import as_run, rename_aside

ResultT = TypeVar("ResultT")
FAILURE_FILE = "failed.txt"
"""The file in the folder of a training that has failed, with the error."""
STOP_SECONDS = 60.0
"""How long trainings that are stopped may take to save a checkpoint."""


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
        self._failures: dict[TrainingJob, CaseFailure] = {}
        stage = comparison.stage
        # those that train weights before those that use them
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
            # an archive may hold a measurement whose weights are gone: then it is trained again for the cases that
            # start from them
            is_finished = self.measurement(job) is not None and (
                self.archive is None or not self._needs_weights(job) or self._has_weights(job)
            )
            if not is_finished and job not in self._failures and self._is_ready(job):
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
            # which trial is the best is not known, but that it takes all other seeds is
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
            # the folder first: it may be newer than an archive that was copied here
            measurement = task.load()
            if measurement is None and self.archive and task.key in self.archive.entries:
                measurement = self.archive.entries[task.key].measurement
            if measurement is None or not task.is_answered_by(measurement):
                # files are read once: others are only added by `add`
                self._missing.add(job)
                return None
            self._measured[job] = measurement
        return self._measured[job]

    @property
    def failures(self) -> tuple[CaseFailure, ...]:
        """The trainings that have failed since this runner was made: they are not tried again by it."""
        return tuple(self._failures.values())

    def fail(self, job: TrainingJob, error: Exception) -> CaseFailure:
        """Take the error of a job; a file in its folder says that no finished training is there."""
        failure = CaseFailure(job.case, self.task(job).name, error)
        self._failures[job] = failure
        folder = self.folder_of(job)
        # a folder without a run file would be taken for one of something else
        if (folder / RUN_FILE).is_file():
            atomic_write_text(folder / FAILURE_FILE, "".join(traceback.format_exception(error)))
        return failure

    def add(self, job: TrainingJob, measurement: CaseMeasurement, machine: str, date: str) -> None:
        """Take the measurement of a job that has been carried out, and archive it."""
        self._measured[job] = measurement
        self._missing.discard(job)
        (self.folder_of(job) / FAILURE_FILE).unlink(missing_ok=True)
        if self.archive is None:
            return
        task = self.task(job)
        self.archive.add(
            ArchivedMeasurement(
                key=task.key,
                comparison=self.comparison.name,
                settings=run_settings(task.run),
                measurement=measurement,
                machine=machine,
                version=VERSION,
                date=date,
            )
        )
        # the weights of a trial are kept until it is known not to be the best
        # a finished training may have been the last user of the weights of another
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
            measurements=tuple(self._measured_of(job for case in cases for job in self._best_jobs(case))),
            machine=machine,
            trials=tuple(self._measured_of(job for case in tried for job in self._jobs_of(case, 0))),
            guesses=guesses,
            failures=self.failures,
        )

    def check_folders(self, log: LogFn) -> None:
        """Raise UserError if a folder contains a training with different settings; one that failed is moved aside."""
        for job in self.known_jobs():
            case = self._case(job)
            file = self.folder_of(job) / RUN_FILE
            if case.trained_by is not None or not file.is_file():
                continue
            if training_hash(case, as_run(file)) != training_hash(case, self.run(job)):
                if (file.parent / FAILURE_FILE).is_file():
                    # its settings were mended
                    log(f"the training that failed is now in {rename_aside(file.parent)}")
                    continue
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
        # trials compete with the first seed alone; the others go to the best
        selects = job.seed == 0 and len(case.trials) > 1 and case.trained_by is None
        return TrainingTask(
            case=case.name,
            trial=case.trials[job.trial].label,
            run=run,
            trained=trained,
            points=points,
            values=self.comparison.values,
            scores=self.comparison.file.score,
            split=self.comparison.file.split,
            selects=selects,
            folder=self.folder_of(job),
            key=self._measurement_key(job),
        )

    def run(self, job: TrainingJob) -> RunConfig:
        """The run of a job, in a folder of its own."""
        run = self._at_seed(job, self._case(job).trials[job.trial].run)
        return run.model_copy(update={"out": str(self.folder_of(job))})

    def folder_of(self, job: TrainingJob) -> Path:
        """The folder of a job's run."""
        if self.archive is not None:
            # tasks of a suite may share a training: its folder is named by what decides the result
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
        # scores of other settings of the data are other measurements of the same training
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
        # two names may differ in characters alone that a folder cannot have
        while name in names.values():
            suffix += 1
            name = f"{slug}-{suffix}"
        names[case] = name
    return names


MayBegin = Callable[[ComparisonRunner, TrainingJob], bool]
"""Whether a training may begin now; False leaves it for a later call."""


class ProgressMeter:
    """Counts the finished trainings of a comparison and estimates the time left.

    `on_progress` gets a line for every progress event, `log` one for every finished training; `total` trainings are to
    be done.
    """

    def __init__(self, total: int, on_progress: LogFn, log: LogFn) -> None:
        self.total = total
        self.completed = 0
        self.on_progress = on_progress
        self.log = log
        self._started = time.perf_counter()

    def report_progress(self, activity: str, share: float = 0.0) -> None:
        """Report the current activity; `share` is the completed part of the current training."""
        current = f"{min(self.completed + 1, self.total)} of {self.total}"
        self.on_progress(f"{activity}; {current}, {self._time_left(share)} left")

    def finish_training(self, outcome: str) -> None:
        """Count a training that is finished and scored, and log its outcome."""
        self.completed += 1
        remaining = ""
        if self.completed < self.total:
            remaining = f", {self._time_left(0.0)} left"
        self.log(f"{outcome}; {self.completed} of {self.total} trained{remaining}")

    def _time_left(self, share: float) -> str:
        """The time left, estimated from the mean duration of the trainings so far."""
        completed = (self.completed + share) / max(1, self.total)
        elapsed = time.perf_counter() - self._started
        return format_duration(elapsed * (1 - completed) / completed if completed else float("inf"))


class WorkerPool:
    """Processes with one thread each that carry out functions; they end with this process, however it ends."""

    def __init__(self, executor: ProcessPoolExecutor, size: int) -> None:
        self.size = size
        self._executor = executor

    def submit(self, function: Callable[..., ResultT], *args: object) -> "Future[ResultT]":
        """Carry out `function(*args)` in a process of the pool; all of it must be picklable."""
        return self._executor.submit(function, *args)


@contextmanager
def worker_pool(size: int, cases: Iterable[ComparisonCase] = ()) -> Iterator[WorkerPool | None]:
    """A pool of `size` processes, which first import what the runs of the cases import; None for one, in this process.

    Leaving the block by an exception stops their trainings, which save a checkpoint, for at most `STOP_SECONDS`."""
    if size == 1:
        yield None
        return
    imports = tuple(dict.fromkeys(name for case in cases for name in case.run.imports))
    # a fork would copy locks of torch's threads, as they are held
    context = multiprocessing.get_context("spawn")
    earlier_children = set(multiprocessing.active_children())
    executor = ProcessPoolExecutor(size, mp_context=context, initializer=_begin_worker, initargs=(imports,))
    try:
        with _safe_path():
            yield WorkerPool(executor, size)
    except BaseException:
        _stop(set(multiprocessing.active_children()) - earlier_children)
        raise
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


@contextmanager
def _safe_path() -> Iterator[None]:
    """Without the current folder in the path of processes that begin, whose files may have the names of modules."""
    setting = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        if setting is None:
            del os.environ["PYTHONSAFEPATH"]
        else:
            os.environ["PYTHONSAFEPATH"] = setting


def _stop(processes: Collection[BaseProcess]) -> None:
    """End processes, those that do not end by themselves by force.

    One that is ended while it returns a result leaves the queue locked, and the others wait for it forever."""
    for process in processes:
        # all first, so that they save their checkpoints at the same time
        process.terminate()
    deadline = time.monotonic() + STOP_SECONDS
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        process.kill()


def run_jobs(
    runners: Sequence[ComparisonRunner],
    meter: ProgressMeter,
    pool: WorkerPool | None = None,
    may_begin: MayBegin = lambda runner, job: True,
) -> None:
    """Carry out all trainings of the runners that are not measured yet, as far as they may begin.

    Without a pool they are carried out one after the other in this process."""
    machine = describe_machine(1 if pool else torch.get_num_threads())
    if pool is None:
        while (ready := next(_ready(runners, may_begin), None)) is not None:
            runner, job = ready
            task = runner.task(job)
            _finish(runner, job, partial(task.measure, meter.report_progress), meter, machine)
        return
    running: dict[Future[CaseMeasurement], tuple[ComparisonRunner, TrainingJob]] = {}
    while True:
        # ready jobs include those that run: they have no measurement yet
        begun = set(running.values())
        for runner, job in _ready(runners, may_begin):
            if len(running) == pool.size:
                break
            if (runner, job) not in begun:
                task = runner.task(job)
                running[pool.submit(TrainingTask.measure, task)] = runner, job
                meter.report_progress(f"{task.name}: begun")
        if not running:
            return
        for future in wait(running, return_when=FIRST_COMPLETED).done:
            _finish(*running.pop(future), future.result, meter, machine)


def _ready(runners: Sequence[ComparisonRunner], may_begin: MayBegin) -> Iterator[tuple[ComparisonRunner, TrainingJob]]:
    return ((runner, job) for runner in runners for job in runner.ready_jobs() if may_begin(runner, job))


def _finish(
    runner: ComparisonRunner,
    job: TrainingJob,
    measure: Callable[[], CaseMeasurement],
    meter: ProgressMeter,
    machine: str,
) -> None:
    """Take what a job has measured, or its failure: the other jobs go on."""
    task = runner.task(job)
    try:
        measurement = measure()
    except (TrainingInterrupted, NotWritable, BrokenExecutor):
        # these end all others as well
        raise
    except Exception as error:
        failure = runner.fail(job, error)
        if task.trains:
            meter.finish_training(f"{failure.name}: failed: {failure.reason}")
        return
    runner.add(job, measurement, machine, date.today().isoformat())
    if task.trains:
        score = runner.comparison.file.score[0]
        values = [scores[score] for scores in measurement.scores]
        shown = ", ".join("none" if value is None else f"{value:.4g}" for value in values)
        meter.finish_training(f"{task.name}: {score} {shown}")


def _begin_worker(imports: tuple[str, ...]) -> None:
    """Prepare a process of the pool: one thread, plug-ins, and an end with the parent process."""
    # scores must not depend on how many trainings share the machine
    torch.set_num_threads(1)
    # Ctrl-C reaches all processes of a terminal: a training saves and ends by its own handler, and an idle worker is
    # ended by the parent
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent(sentinel: int) -> None:
        wait_for_sentinel([sentinel])
        os._exit(1)

    # a killed parent sends no signal, but its sentinel becomes ready
    threading.Thread(target=end_with_parent, args=(parent.sentinel,), daemon=True).start()
    import_modules(imports)


def describe_machine(threads: int) -> str:
    """The device, the number of threads and the versions that measurements depend on."""
    device = gpu_name(best_device()) or "a CPU"
    return f"{device}, {threads} thread{'s' * (threads > 1)}, torch {torch.__version__}, manyformer {VERSION}"
