"""Carry out the trainings of comparisons, in this process or in several at once."""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from datetime import date
from multiprocessing.connection import wait as wait_for_sentinel
from multiprocessing.process import BaseProcess
from typing import TypeVar

import torch

from manyformer.compare.measurement import CaseMeasurement
from manyformer.compare.runner import ComparisonRunner, TrainingJob
from manyformer.compare.training_task import TrainingTask
from manyformer.config.comparison import ComparisonCase
from manyformer.plugins import import_modules
from manyformer.system.devices import best_device, gpu_name
from manyformer.train.events import format_duration
from manyformer.type_aliases import LogFn
from manyformer.version import VERSION

ResultT = TypeVar("ResultT")
STOP_SECONDS = 60.0
"""How long trainings that are stopped may take to save a checkpoint."""

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
    context = multiprocessing.get_context("spawn")
    before = set(multiprocessing.active_children())
    executor = ProcessPoolExecutor(size, mp_context=context, initializer=_begin_worker, initargs=(imports,))
    try:
        with _safe_path():
            yield WorkerPool(executor, size)
    except BaseException:
        _stop(set(multiprocessing.active_children()) - before)
        raise
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


@contextmanager
def _safe_path() -> Iterator[None]:
    """Without the current folder in the path of processes that begin, whose files may have the names of modules."""
    before = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONSAFEPATH"]
        else:
            os.environ["PYTHONSAFEPATH"] = before


def _stop(processes: Collection[BaseProcess]) -> None:
    """End processes, those that do not end by themselves by force.

    One that is ended while it returns a result leaves the queue locked, and the others wait for it forever."""
    for process in processes:
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
            _finish(runner, job, runner.task(job).measure(meter.report_progress), meter, machine)
        return
    running: dict[Future[CaseMeasurement], tuple[ComparisonRunner, TrainingJob]] = {}
    while True:
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
            _finish(*running.pop(future), future.result(), meter, machine)


def _ready(runners: Sequence[ComparisonRunner], may_begin: MayBegin) -> Iterator[tuple[ComparisonRunner, TrainingJob]]:
    return ((runner, job) for runner in runners for job in runner.ready_jobs() if may_begin(runner, job))


def _finish(
    runner: ComparisonRunner, job: TrainingJob, measurement: CaseMeasurement, meter: ProgressMeter, machine: str
) -> None:
    task = runner.task(job)
    runner.add(job, measurement, machine, date.today().isoformat())
    if task.trains:
        score = runner.comparison.file.score[0]
        values = [scores[score] for scores in measurement.scores]
        shown = ", ".join("none" if value is None else f"{value:.4g}" for value in values)
        meter.finish_training(f"{task.name}: {score} {shown}")


def _begin_worker(imports: tuple[str, ...]) -> None:
    """Prepare a process of the pool: one thread, plug-ins, and an end with the parent process."""
    torch.set_num_threads(1)
    # Ctrl-C reaches all processes of a terminal: a training saves and ends by its own handler, and an idle worker is
    # ended by the parent
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent(sentinel: int) -> None:
        wait_for_sentinel([sentinel])
        os._exit(1)

    threading.Thread(target=end_with_parent, args=(parent.sentinel,), daemon=True).start()
    import_modules(imports)


def describe_machine(threads: int) -> str:
    """The device, the number of threads and the versions that measurements depend on."""
    device = gpu_name(best_device()) or "a CPU"
    return f"{device}, {threads} thread{'s' * (threads > 1)}, torch {torch.__version__}, manyformer {VERSION}"
