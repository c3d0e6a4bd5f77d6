"""`compare`: runs a comparison, given by name or file, and writes its report."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from manyformer.analysis.comparisons.claims import parse_claim
from manyformer.analysis.comparisons.comparison_report import ComparisonResult, write_comparison
from manyformer.analysis.comparisons.given_cases import (
    Cases,
    GivenBatches,
    GivenCase,
    GivenRunner,
    python_comparison,
    read_cases,
)
from manyformer.analysis.comparisons.runner import (
    ComparisonRunner,
    ProgressMeter,
    TrainingJob,
    describe_machine,
    run_jobs,
    worker_pool,
)
from manyformer.analysis.comparisons.scoring import check_score
from manyformer.analysis.comparisons.sizing import match_sizes
from manyformer.analysis.comparisons.suite_results import DEFAULT_FOLDER
from manyformer.analysis.comparisons.training_task import StepCost, measure_steps, run_settings
from manyformer.base.errors import UserError, UserErrors, suggest_names
from manyformer.base.files.json_text import json_text
from manyformer.base.plugins import import_for_run
from manyformer.base.system import resumable
from manyformer.base.type_aliases import LogFn
from manyformer.config.comparison import Comparison
from manyformer.config.load_comparison import load_comparison
from manyformer.data.generated.synthetic_floors import GuessFloors, guess_floors
from manyformer.recipes.parts.own_modules import LossFn
from manyformer.recipes.parts.registry import build_on_meta
from manyformer.training.run_checks import RunChecker
from manyformer.training.run_folder import recipe_lookup, rename_aside


def read_comparison(target: str | Path, overrides: Sequence[str] = ()) -> Comparison:
    """Load a comparison and check its runs, scores and claims without training, with models as large as its reference.

    Raises UserErrors, and UserError for a model that cannot be as large."""
    comparison = load_comparison(target, overrides, recipes=recipe_lookup(import_for_run))
    if errors := list(comparison_errors(comparison)):
        raise UserErrors(dict.fromkeys(errors))
    reference = comparison.file.reference
    if reference is None:
        return comparison
    return match_sizes(comparison, reference)


def comparison_errors(comparison: Comparison) -> Iterator[str]:
    """What is wrong with the scores, the claims and the models of a comparison, found without training."""
    names = [case.name for case in comparison.cases]
    file = comparison.file
    if file.reference is not None and file.reference not in names:
        yield f"reference: there is no case '{file.reference}'; {suggest_names(file.reference, names)}"
    checks: list[tuple[str, Callable[[], object]]] = []
    for text in file.claims:
        checks.append(("", partial(parse_claim, text, names, comparison.values, file.score, file.cost)))
    for case in comparison.cases:
        checks += [("", partial(check_score, score, case.run)) for score in file.score]
    for case in comparison.cases:
        # trials mostly differ in the optimizer: each model is built once
        models = {json_text(trial.run.model): trial.run for trial in case.trials}
        checks += [(f"case {case.name}: ", partial(build_on_meta, run.recipe, run.model)) for run in models.values()]
    # every problem is said at once: a file is mended in one go
    for prefix, check in checks:
        try:
            check()
        except ValueError as error:
            yield f"{prefix}{error}"


def check_comparison(
    comparison: Comparison, seeds: int | None, out: str | Path | None, on_progress: LogFn = lambda text: None
) -> None:
    """Check a comparison as `compare` does before it trains. Raises UserErrors that name the cases."""
    seed_count = comparison.file.seeds if seeds is None else seeds
    check_missing([ComparisonRunner(comparison, result_folder(comparison.name, out), seed_count)], on_progress)


def check_missing(runners: Sequence[ComparisonRunner], on_progress: LogFn = lambda text: None) -> None:
    """Build the model and open the data of every case that is not measured yet. Raises UserErrors that name the cases.

    A case that begins with the weights of another one is built, but its data may need those weights."""
    errors: dict[str, None] = {}
    for runner in runners:
        comparison = runner.comparison
        checker = RunChecker(comparison.file.split)
        missing = [case for case in comparison.cases if runner.count_missing_of(case)]
        for number, case in enumerate(missing, start=1):
            on_progress(f"checking {case.name}; {number} of {len(missing)}")
            # trials that differ in the optimizer alone have one model and one data
            runs = {
                json_text([run_settings(trial.run)[key] for key in ("model", "data")]): trial.run
                for trial in case.trials
            }
            for run in runs.values():
                try:
                    checker.check(run, with_data=case.init_from_case is None)
                except UserError as error:
                    errors.update(dict.fromkeys(f"case {case.name}: {line}" for line in str(error).splitlines()))
    if errors:
        raise UserErrors(errors)


def raise_if_all_failed(runners: Sequence[ComparisonRunner]) -> None:
    """Raise the errors of all trainings if there is nothing else to report."""
    failures = [failure for runner in runners for failure in runner.failures]
    if not failures or any(runner.result().measurements for runner in runners):
        return
    defects = [failure.error for failure in failures if not isinstance(failure.error, UserError)]
    if defects:
        raise defects[0]
    raise UserErrors(dict.fromkeys(f"{failure.name}: {failure.reason}" for failure in failures))


def comparison_guesses(comparison: Comparison) -> GuessFloors | None:
    """The floors of the first case's data, as it is scored first; None unless it is generated and the main score is
    the accuracy."""
    point = comparison.cases[0].points[0]
    if comparison.file.score[0] == "accuracy" and point is not None:
        return guess_floors(point.data)
    return None


@resumable()
def compare(
    target: str | Path | Comparison | Cases,
    overrides: Sequence[str] | Mapping[str, Any] = (),
    *,
    data: Any = None,
    eval_data: Any = None,
    loss: LossFn | None = None,
    score: Sequence[str] = ("loss",),
    title: str = "comparison",
    seeds: int | None = None,
    out: str | Path | None = None,
    fresh: bool = False,
    jobs: int = 1,
    on_progress: LogFn = lambda text: None,
    log: LogFn = lambda text: None,
) -> ComparisonResult:
    """Train and score every case of a comparison and write its table and picture below `out`.

    `target` is a shipped comparison's name or a file; `overrides` such as `["limits.steps=100"]` apply to the runs of
    all cases. Finished trainings in the same folder are reused, and an interrupted training resumes; `fresh` moves them
    aside. `jobs` processes of one thread each train at once; with 1 this process trains. `on_progress` gets a line
    about the current activity, `log` one about each finished training. A training that fails is a row without scores,
    and one of the result's `failures`. Raises UserError for what is wrong before anything is trained and if all
    trainings fail, `TrainingInterrupted` after Ctrl-C or SIGTERM.

    In the place of a file, `target` may be cases: a dict of names, or a list, of recipes' names, modules, classes or
    functions that give one, or mappings of settings of which `recipe` is one of these. With `data` and `eval_data`, as
    `train` takes them, all are trained on the same batches in the same order, else on the data of the overrides; the
    objects that are given stay as they are. `score` are the scores of the table, `loss` is as in `train`.
    """
    batches = None
    if data is not None:
        if isinstance(target, Comparison | str | Path):
            raise UserError("data= is for cases that are given as objects; a comparison's file names its own data")
        if eval_data is None:
            raise UserError("data= needs eval_data= beside it, on which all cases are scored")
        batches = GivenBatches(data, eval_data, loss)
    cases: list[GivenCase] = []
    if isinstance(target, Comparison):
        comparison = target
    elif isinstance(target, str | Path):
        if isinstance(overrides, Mapping):
            # as on the command line, over the settings of a file
            overrides = [f"{name}={json_text(value)}" for name, value in overrides.items()]
        comparison = read_comparison(target, overrides)
    else:
        cases = read_cases(target)
        comparison = python_comparison(cases, overrides, batches, title=title, score=score)
        if jobs > 1:
            raise UserError(f"jobs={jobs} starts processes that cannot be given these objects; leave it out")
    folder = result_folder(comparison.name, out)
    seed_count = comparison.file.seeds if seeds is None else seeds
    for name, number in (("seeds", seed_count), ("jobs", jobs)):
        if number < 1:
            raise UserError(f"{name} ({number}) must be at least 1")
    if fresh:
        move_aside(folder, log)
    if batches is None:
        runner = ComparisonRunner(comparison, folder, seed_count)
    else:
        runner = GivenRunner(comparison, folder, seed_count, cases, batches)
    # before anything is trained: a folder of other settings would mix two comparisons
    runner.check_folders(log)
    if batches is None:
        check_missing([runner], on_progress)
    guesses = comparison_guesses(comparison)
    meter = ProgressMeter(runner.count_missing(), on_progress, log)
    with worker_pool(jobs, comparison.cases) as pool:
        run_jobs([runner], meter, pool)
    raise_if_all_failed([runner])
    steps = _measure_costs(comparison, runner, meter)
    result = replace(runner.result(describe_machine(1 if jobs > 1 else torch.get_num_threads()), guesses), steps=steps)
    return write_comparison(result, folder)


def result_folder(name: str, out: str | Path | None) -> Path:
    """The folder of the results of a comparison: `out`, or one with its name."""
    if out is not None:
        return Path(out)
    return Path(DEFAULT_FOLDER) / name.replace("/", "-")


def move_aside(folder: Path, log: LogFn) -> None:
    """Rename the folder of an earlier comparison, if there is one."""
    if folder.exists():
        log(f"the earlier comparison is now in {rename_aside(folder)}")


def _measure_costs(comparison: Comparison, runner: ComparisonRunner, meter: ProgressMeter) -> dict[str, StepCost]:
    if not {"step", "memory"} & set(comparison.file.cost):
        return {}
    meter.report_progress("measuring steps", 1.0)
    # only the best trial of a case is in the table, and its weights are still there
    failed = {failure.case for failure in runner.failures}
    cases = [case for case in comparison.cases if case.trained_by is None and case.name not in failed]
    best = {case.name: runner.best_trial(case) for case in cases}
    jobs = {name: TrainingJob(name, trial or 0, 0) for name, trial in best.items()}
    return measure_steps({name: (runner.run(job), runner.folder_of(job)) for name, job in jobs.items()})
