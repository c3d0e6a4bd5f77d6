"""How long the trainings of comparisons take: a few steps and scored batches of each case are timed beforehand."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from pydantic import ConfigDict

from manyformer.analysis.comparisons.comparison_report import spell_duration
from manyformer.analysis.comparisons.runner import ComparisonRunner, TrainingJob, WorkerPool, describe_machine
from manyformer.analysis.comparisons.training_task import TrainingTask, content_hash, run_settings
from manyformer.base.files.json_records import JsonLines
from manyformer.base.system import temporary_folder
from manyformer.config import RunConfig
from manyformer.config.comparison import Comparison, ComparisonCase
from manyformer.config.suite import BudgetName
from manyformer.nn.runtime.costs import count_flops
from manyformer.training.step_job import step_of_run

MIN_SECONDS = 1.0
MIN_STEPS = 2
MAX_STEPS = 50
"""Steps are timed for this long, at least and at most so many."""


@dataclass(frozen=True)
class TrainingTiming:
    """The time on this machine of a training of one step with its scores, and of a step; and a step's operations."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    key: str
    machine: str
    first_seconds: float
    step_seconds: float
    step_flops: int

    def seconds(self, steps: int) -> float:
        """The time of a training with so many steps and its scores."""
        return self.first_seconds + (steps - 1) * self.step_seconds


TimingStore = JsonLines[TrainingTiming]
CaseTimings = Mapping[tuple[str, str], TrainingTiming]
"""The timing of each case, by the names of its comparison and its own."""


@dataclass(frozen=True)
class PlannedCase:
    """The trainings of a case that are missing: their number, and the seconds of each."""

    comparison: str
    case: str
    trainings: int
    seconds: float


@dataclass(frozen=True)
class TrainingPlan:
    """The missing trainings of several comparisons on `jobs` processes."""

    cases: tuple[PlannedCase, ...]
    jobs: int

    @property
    def trainings(self) -> int:
        return sum(case.trainings for case in self.cases)

    @property
    def seconds(self) -> float:
        """The time of all: the work shared by the processes, and half of the longest training, which ends alone."""
        work = sum(case.trainings * case.seconds for case in self.cases)
        longest = max((case.seconds for case in self.cases if case.trainings), default=0.0)
        # the last trainings do not fill all processes
        return work / self.jobs + (longest / 2 if self.jobs > 1 else 0.0)

    def seconds_of(self, comparison: str, case: str) -> float:
        """The time of the longest training of a case."""
        return max((c.seconds for c in self.cases if (c.comparison, c.case) == (comparison, case)), default=0.0)

    @property
    def summary_line(self) -> str:
        """The number of trainings and their time, as a sentence."""
        jobs = "1 job" if self.jobs == 1 else f"{self.jobs} jobs"
        trainings = "1 training"
        if self.trainings != 1:
            trainings = f"{self.trainings} trainings"
        return f"this takes {spell_duration(self.seconds)} on {jobs}: {trainings}"


def time_cases(
    runners: Sequence[ComparisonRunner],
    store: TimingStore,
    pool: WorkerPool | None,
    on_progress: Callable[[str], None] = lambda text: None,
) -> CaseTimings:
    """The timing of each case of each comparison, by their names; timings in the store are not repeated.

    They are made with as many processes at once as the trainings (None: in this one), so that both share the machine in
    the same way."""
    machine = f"{describe_machine(1)}, {1 if pool is None else pool.size} at once"
    tasks = {
        (runner.comparison.name, case.name): runner.task(TrainingJob(case.name, 0, 0))
        for runner in runners
        for case in runner.comparison.cases
        if case.trained_by is None
    }
    # cases of several comparisons may be equal but for what does not take time
    keys = {name: _timing_key(task, machine) for name, task in tasks.items()}
    missing = {keys[name]: task for name, task in tasks.items() if keys[name] not in store.entries}
    if pool is None:
        timings = (time_training(task, key, machine) for key, task in missing.items())
    else:
        futures = [pool.submit(time_training, task, key, machine) for key, task in missing.items()]
        timings = (future.result() for future in futures)
    for number, task in enumerate(missing.values(), start=1):
        on_progress(f"timing {task.case}; {number} of {len(missing)}")
        store.add(next(timings))
    return {name: store.entries[key] for name, key in keys.items()}


def plan_trainings(runners: Sequence[ComparisonRunner], timings: CaseTimings, jobs: int) -> TrainingPlan:
    """The plan for the missing trainings, from the timings of their cases."""
    cases = []
    for runner in runners:
        for case in runner.comparison.cases:
            count = runner.count_missing_of(case)
            timing = timings[runner.comparison.name, case.name]
            cases.append(
                PlannedCase(runner.comparison.name, case.name, count, timing.seconds(case.run.limits.steps or 0))
            )
    return TrainingPlan(tuple(cases), jobs)


def with_budget(
    comparison: Comparison,
    budget: BudgetName,
    reference: str,
    timings: CaseTimings,
    best: Mapping[str, int],
) -> Comparison:
    """The comparison with the best trial of each case (the first, where it is not known) and another number of steps.

    Each case takes as many steps as cost what the steps of `reference` cost: by `budget` in operations of a training
    step, or in its seconds on this machine. The schedule is stretched with the steps."""

    def cost(case: str) -> float:
        timing = timings[comparison.name, case]
        if budget == "operations":
            return timing.step_flops
        return timing.step_seconds

    def changed(case: ComparisonCase) -> ComparisonCase:
        factor = cost(reference) / cost(case.name)
        trial = case.trials[best.get(case.name, 0)]
        return replace(case, trials=(trial.with_runs(partial(_stretched, factor=factor)),))

    return replace(comparison, cases=tuple(map(changed, comparison.cases)))


def _stretched(run: RunConfig, factor: float) -> RunConfig:
    """The run with its steps, those of warm-up and those of the schedule multiplied by `factor`."""

    def scaled(steps: int) -> int:
        return max(1, round(steps * factor))

    assert run.limits.steps is not None
    limits = run.limits.model_copy(update={"steps": scaled(run.limits.steps)})
    lengths = {name: getattr(run.schedule, name, None) for name in ("warmup", "steps")}
    # a cosine that ended before or after the training would be another schedule
    changes = {name: scaled(steps) for name, steps in lengths.items() if steps is not None}
    return run.model_copy(update={"limits": limits, "schedule": run.schedule.model_copy(update=changes)})


def time_training(task: TrainingTask, key: str, machine: str) -> TrainingTiming:
    """Time a training of one step with its scores, and further steps."""
    with temporary_folder() as folder:
        limits = task.run.limits.model_copy(update={"steps": 1})
        # weights of other trainings do not exist yet, and do not change the time of a step
        run = task.run.model_copy(update={"out": str(folder / "run"), "init_from": None, "limits": limits})
        points = tuple(None if point is None else point.model_copy(update={"init_from": None}) for point in task.points)
        short = replace(task, run=run, trained=run, points=points, folder=folder / "run")
        started = time.perf_counter()
        short.measure()
        first_seconds = time.perf_counter() - started
        job = step_of_run(run, folder / "run")
        job()
        # counted after a step that filled caches, and not while it is timed: counting is slow
        step_flops = count_flops(job)
        started = time.perf_counter()
        steps = 0
        # short steps are repeated, because a single one measures the clock
        while steps < MIN_STEPS or (time.perf_counter() - started < MIN_SECONDS and steps < MAX_STEPS):
            job()
            steps += 1
        step_seconds = (time.perf_counter() - started) / steps
    return TrainingTiming(key, machine, first_seconds, step_seconds, step_flops)


def _timing_key(task: TrainingTask, machine: str) -> str:
    settings = run_settings(task.run.model_copy(update={"init_from": None}))
    points = [None if point is None else run_settings(point).get("data") for point in task.points]
    # trials differ in these, and take the same time
    for section in ("optim", "limits", "seed", "init_from"):
        settings.pop(section, None)
    return content_hash([settings, points, machine])
