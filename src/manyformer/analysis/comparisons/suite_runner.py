"""Run a suite: the comparisons of all tasks with models of equal size, in parallel, from and into one archive.

What the models cost at several lengths is measured once for all tasks: time, memory, operations, and the state."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import torch

from manyformer.analysis.benchmarks import BenchCandidate, bench
from manyformer.analysis.comparisons.compare import (
    check_missing,
    comparison_errors,
    comparison_guesses,
    move_aside,
    raise_if_all_failed,
    result_folder,
)
from manyformer.analysis.comparisons.planner import (
    CaseTimings,
    TrainingPlan,
    TrainingTiming,
    plan_trainings,
    time_cases,
    with_budget,
)
from manyformer.analysis.comparisons.runner import (
    ComparisonRunner,
    ProgressMeter,
    TrainingJob,
    WorkerPool,
    describe_machine,
    run_jobs,
    worker_pool,
)
from manyformer.analysis.comparisons.sizing import match_sizes
from manyformer.analysis.comparisons.suite_pictures import write_suite
from manyformer.analysis.comparisons.suite_report import SuiteResult, TaskResult, state_bytes_at
from manyformer.analysis.comparisons.suite_results import EQUAL_STEPS, CaseCosts, LengthCost
from manyformer.analysis.comparisons.training_task import content_hash, open_archive
from manyformer.base.errors import UserError, UserErrors
from manyformer.base.files.json_records import JsonLines
from manyformer.base.plugins import import_for_run
from manyformer.base.system import resumable
from manyformer.base.type_aliases import LogFn
from manyformer.config import RunConfig
from manyformer.config.comparison import Comparison
from manyformer.config.suite import BudgetName, Suite, SuiteTask, load_suite
from manyformer.recipes.parts.registry import all_recipes
from manyformer.training.run_folder import recipe_lookup

ARCHIVE_FILE = "measurements.jsonl"
TIMINGS_FILE = "timings.jsonl"
COSTS_FILE = "costs.jsonl"
"""The files of a suite's folder from which it goes on: they may be copied to another machine."""

COST_ROUNDS = 3

MAX_COST_SECONDS = 20.0
"""A forward pass or a step that takes longer is not measured at greater lengths."""

ALL = "all"
"""Chosen in place of names: every recipe that can do the tasks, besides the cases of the suite."""

PRETRAINED = "equal steps after pretraining"


@dataclass(frozen=True)
class SuiteOptions:
    """How a suite is carried out: the seeds (None: its own), the processes, and the hours after which none begins."""

    seeds: int | None = None
    jobs: int = 1
    max_hours: float | None = None

    def __post_init__(self) -> None:
        for name in ("seeds", "jobs", "max_hours"):
            if (number := getattr(self, name)) is not None and number <= 0:
                raise UserError(f"{name} ({number}) must be above 0")


def read_suite(target: str | Path, overrides: Sequence[str] = (), chosen: Sequence[str] = ()) -> Suite:
    """Load a suite, solve for equal sizes and check its runs, scores and claims without training.

    `chosen` names its cases and other recipes, `all` means every recipe that fits. Raises UserErrors."""
    recipes = recipe_lookup(import_for_run)
    suite = load_suite(target, overrides, recipes=recipes, chosen=[name for name in chosen if name != ALL])
    if ALL in chosen:
        names = [*suite.cases, *fitting_recipes(suite)]
        suite = load_suite(target, overrides, recipes=recipes, chosen=list(dict.fromkeys(names)))
    tasks = tuple(_with_equal_sizes(task, suite.file.reference) for task in suite.tasks)
    errors = [error for task in tasks for error in comparison_errors(task.comparison)]
    errors += [
        f"case {case.name}: a suite needs limits.steps as its only limit (task {task.name})"
        for task in tasks
        for case in task.comparison.cases
        # budgets multiply steps, and other limits would end a training before them
        if [name for name, limit in case.run.limits if limit is not None] != ["steps"]
    ]
    if errors:
        raise UserErrors(dict.fromkeys(errors))
    return replace(suite, tasks=tasks)


def fitting_recipes(suite: Suite) -> list[str]:
    """The causal recipes that learn from the data of all tasks of a suite."""
    kinds = {task.comparison.cases[0].run.data.kind for task in suite.tasks}
    task_name = all_recipes()[suite.tasks[0].comparison.cases[0].run.recipe].card.task.name
    return [
        name
        for name, recipe in all_recipes().items()
        if recipe.card.task.name == task_name
        and "causal" in recipe.card.promises
        and kinds <= set(recipe.card.task.data_kinds())
    ]


def _with_equal_sizes(task: SuiteTask, reference: str) -> SuiteTask:
    pretrained = None
    if task.pretrained is not None:
        pretrained = match_sizes(task.pretrained, reference)
    return replace(task, comparison=match_sizes(task.comparison, reference), pretrained=pretrained)


class SuiteRunner:
    """Plans and carries out the trainings of a suite in a folder."""

    def __init__(self, suite: Suite, folder: Path, options: SuiteOptions, on_progress: LogFn, log: LogFn) -> None:
        self.suite = suite
        self.folder = folder
        self.options = options
        self.on_progress = on_progress
        self.log = log
        if options.seeds is None:
            self.seeds = suite.file.seeds
        else:
            self.seeds = options.seeds
        self.archive = open_archive(folder / ARCHIVE_FILE)
        self.timings = JsonLines(folder / TIMINGS_FILE, TrainingTiming, "a line of timings")
        self.costs = JsonLines(folder / COSTS_FILE, CaseCosts, "a line of costs of models")
        self.runners = [self._runner(task.comparison) for task in suite.tasks]
        self.pretrained_runners = [self._runner(task.pretrained) for task in suite.tasks if task.pretrained is not None]

    @property
    def first_runners(self) -> list[ComparisonRunner]:
        """The runners of equal steps, with and without pretraining."""
        return [*self.runners, *self.pretrained_runners]

    def plan(self, pool: WorkerPool | None) -> tuple[TrainingPlan, CaseTimings]:
        """The plan for all missing trainings, and the timings that it rests on."""
        timings = time_cases(self.first_runners, self.timings, pool, self.on_progress)
        budgeted = chain.from_iterable(self.budget_runners(timings).values())
        return plan_trainings([*self.first_runners, *budgeted], timings, self.options.jobs), timings

    def budget_runners(self, timings: CaseTimings) -> dict[str, list[ComparisonRunner]]:
        """The runners of the budgets besides equal steps by their columns, with the best trials that are known."""
        budgets = [budget for budget in self.suite.file.budgets if budget != "steps"]
        return {
            f"equal {budget}": [self._with_budget(runner, budget, timings) for runner in self.runners]
            for budget in budgets
        }

    def _with_budget(self, runner: ComparisonRunner, budget: BudgetName, timings: CaseTimings) -> ComparisonRunner:
        """The runner of the same comparison with the steps of another budget."""
        # a plan is made before trials are trained: the first stands for the best
        best = {case.name: runner.best_trial(case) or 0 for case in runner.comparison.cases}
        comparison = with_budget(runner.comparison, budget, self.suite.file.reference, timings, best)
        return self._runner(comparison)

    def run(self, pool: WorkerPool | None) -> SuiteResult:
        """Carry out all trainings that fit into the hours, and measure the costs."""
        started = time.monotonic()
        # before training: data that cannot be guessed at is found within seconds
        guesses = [comparison_guesses(task.comparison) for task in self.suite.tasks]
        check_missing(self.first_runners, self.on_progress)
        plan, timings = self.plan(pool)
        self.log(plan.summary_line)
        may_begin = self._deadline(plan)
        meter = ProgressMeter(plan.trainings, self.on_progress, self.log)
        # equal steps first, because they decide the best trials that other budgets train
        run_jobs(self.first_runners, meter, pool, may_begin)
        budgets = self.budget_runners(timings)
        budgeted = list(chain.from_iterable(budgets.values()))
        run_jobs(budgeted, meter, pool, may_begin)
        raise_if_all_failed([*self.first_runners, *budgeted])
        seconds = time.monotonic() - started
        columns = {EQUAL_STEPS: self.runners, **budgets}
        if self.pretrained_runners:
            columns[PRETRAINED] = self.pretrained_runners
        tasks = [
            TaskResult(task, {column: runners[index].result() for column, runners in columns.items()}, guesses[index])
            for index, task in enumerate(self.suite.tasks)
        ]
        runs = {case.name: case.run for case in self.suite.tasks[0].comparison.cases}
        costs = measure_case_costs(runs, self.suite.file.lengths, self.costs, self.on_progress)
        missing = sum(runner.count_missing() for runner in [*self.first_runners, *budgeted])
        machine = describe_machine(1) + (f", {self.options.jobs} trainings at once" if self.options.jobs > 1 else "")
        return SuiteResult(self.suite, self.seeds, tuple(tasks), costs, missing, machine, plan.seconds, seconds)

    def _runner(self, comparison: Comparison) -> ComparisonRunner:
        return ComparisonRunner(comparison, self.folder, self.seeds, self.archive)

    def _deadline(self, plan: TrainingPlan) -> Callable[[ComparisonRunner, TrainingJob], bool]:
        """Whether a training would end within the hours, by the plan."""
        if self.options.max_hours is None:
            return lambda runner, job: True
        end = time.monotonic() + 3600 * self.options.max_hours
        return lambda runner, job: time.monotonic() + plan.seconds_of(runner.comparison.name, job.case) <= end


CostStore = JsonLines[CaseCosts]


def measure_case_costs(
    runs: Mapping[str, RunConfig],
    lengths: Sequence[int],
    store: CostStore,
    on_progress: Callable[[str], None] = lambda text: None,
) -> dict[str, CaseCosts]:
    """The costs of the model of each run at each length, by the names of the cases; those in the store are reused."""
    costs: dict[str, CaseCosts] = {}
    for name, run in runs.items() if lengths else ():
        # another machine or version measures again, which scores need not
        key = content_hash([run.recipe, run.model, list(lengths), describe_machine(1)])
        if key not in store.entries:
            on_progress(f"measuring the costs of {name}")
            store.add(_measure_costs(key, name, run, lengths))
        costs[name] = store.entries[key]
    return costs


def _measure_costs(key: str, name: str, run: RunConfig, lengths: Sequence[int]) -> CaseCosts:
    candidate = BenchCandidate(name, run.recipe, dict(run.model))
    report = bench(
        [candidate],
        lengths,
        # decoding is described by its state, which follows from the model
        what=("forward", "step"),
        against=None,
        rounds=COST_ROUNDS,
        max_seconds=MAX_COST_SECONDS,
        device="cpu",
    )
    cells = {(cell.kind, cell.length): cell for cell in report.cells}
    costs = tuple(
        LengthCost(
            length,
            forward_seconds=cells["forward", length].seconds,
            step_seconds=cells["step", length].seconds,
            step_memory=cells["step", length].memory,
            flops=cells["forward", length].flops,
            state_bytes=state_bytes_at(run.recipe, run.model, length),
        )
        for length in sorted(set(lengths))
    )
    return CaseCosts(key, name, run.recipe, dict(run.model), describe_machine(1), costs)


def plan_suite(
    suite: Suite, options: SuiteOptions, out: str | Path | None = None, on_progress: LogFn = lambda text: None
) -> TrainingPlan:
    """The plan for the missing trainings of a suite: a few steps of each case are timed, and nothing is trained."""
    runner = SuiteRunner(suite, result_folder(suite.name, out), options, on_progress, lambda text: None)
    check_missing(runner.first_runners, on_progress)
    with _pool(suite, options) as pool:
        return runner.plan(pool)[0]


@resumable()
def run_suite(
    suite: Suite,
    options: SuiteOptions,
    *,
    out: str | Path | None = None,
    fresh: bool = False,
    on_progress: LogFn = lambda text: None,
    log: LogFn = lambda text: None,
) -> SuiteResult:
    """Train and score all cases of a suite on all tasks and write its tables and pictures below `out`.

    Measurements in the folder's files are reused, whatever machine they come from; `fresh` moves them aside. A killed
    suite goes on with the same call. Raises UserError, and `TrainingInterrupted` after Ctrl-C or SIGTERM."""
    folder = result_folder(suite.name, out)
    if fresh:
        move_aside(folder, log)
    with _pool(suite, options) as pool:
        result = SuiteRunner(suite, folder, options, on_progress, log).run(pool)
    return write_suite(result, folder)


@contextmanager
def _pool(suite: Suite, options: SuiteOptions) -> Iterator[WorkerPool | None]:
    """The processes of a suite: also a single one has one thread, so that scores do not depend on their number."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with worker_pool(options.jobs, suite.tasks[0].comparison.cases) as pool:
            yield pool
    finally:
        torch.set_num_threads(threads)
