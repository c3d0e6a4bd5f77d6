"""Advice on which recipe to take: what was measured that fits a task, a length, a budget and a device.

Language models are compared by a suite; other tasks by the comparisons, timings and counts that come with the package.
Nothing is extrapolated but the size of the state. Nothing here needs torch, unless a state has to be computed."""

from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from pathlib import Path

from manyformer.analysis.comparisons.advice import CPU, Advice, AdviceRow, Candidate, Needs, find_device
from manyformer.analysis.comparisons.claims import SIGNIFICANCE_LEVEL
from manyformer.analysis.comparisons.measured_rows import decoding_cells, state_by_growth
from manyformer.analysis.comparisons.suite_results import (
    EQUAL_STEPS,
    CaseCosts,
    SuiteRecord,
    TaskRecord,
    find_results,
    read_results,
)
from manyformer.analysis.comparisons.task_advice import (
    MOST_CANDIDATES,
    budget_limits,
    next_commands,
    published_of,
    reason_against,
    rows_of_recipe,
    task_advice,
    unscored_row,
)
from manyformer.base.errors import UserError, suggest_names
from manyformer.recipes.parts.cards import listed_recipes

TEXT_TASKS = ("language-model", "masked-lm", "translation", "classification", "tagging")
"""Tasks whose inputs may have any length."""

LANGUAGE_MODEL = "language-model"
BYTES_OF_TRAINING = 16
"""Of each parameter in float32: itself, its gradient, and the two running means of AdamW."""


def advise(
    *,
    task: str | None = None,
    length: int | None = None,
    parameters: int | None = None,
    memory: int | None = None,
    minutes: float | None = None,
    device: str | None = None,
    results: str | Path | None = None,
) -> Advice:
    """Three recipes for a task and sequences of `length` tokens, with the measured rows that this rests on.

    `task` is a task of the suite, an ability that it tests, such as recall, or the task of a recipe, such as
    translation; without it all tasks of the suite count. `memory` bounds the bytes of the state of one sequence,
    `minutes` the training that was measured. `device` is `cpu` (the default), a known GPU such as `h100`, or any other
    with its memory, as in `rtx-4070 12GB`. `results` are those of a suite of one's own. Raises UserError for what
    cannot be answered."""
    needs = Needs(task, length, parameters, memory, minutes, find_device(device or CPU))
    _check_size(needs)
    suite = read_results(find_results() if results is None else Path(results))
    tasks = [record for record in suite.tasks if task in (None, LANGUAGE_MODEL, record.task, *record.kinds)]
    if not tasks and task not in recipe_tasks():
        kinds = dict.fromkeys(kind for record in suite.tasks for kind in record.kinds)
        names = [record.task for record in suite.tasks]
        hint = suggest_names(task or "", [*names, *kinds, *recipe_tasks()])
        raise UserError(f"the suite {suite.name} has no task '{task}'; {hint}")
    if length is None and (tasks or task in TEXT_TASKS):
        raise UserError("advise needs --length, the tokens of your sequences, such as --length 4096")
    if tasks:
        return _suite_advice(suite, tasks, needs, length or 1)
    return task_advice(needs)


def recipe_tasks() -> list[str]:
    """The tasks that recipes are for."""
    return list(dict.fromkeys(listed.card.task.name for listed in listed_recipes().values()))


def _check_size(needs: Needs) -> None:
    """Raise UserError for numbers that nothing can have, and for more parameters than the device can train."""
    bounds = {
        "--length": needs.length,
        "--parameters": needs.parameters,
        "--memory": needs.memory,
        "--minutes": needs.minutes,
    }
    for option, bound in bounds.items():
        if bound is not None and not (isfinite(bound) and bound > 0):
            raise UserError(f"{option} ({bound}) must be greater than 0")
    device = needs.device
    if needs.parameters is None or device.memory is None:
        return
    needed = BYTES_OF_TRAINING * needs.parameters
    if needed > device.memory:
        raise UserError(
            f"--parameters ({needs.parameters:,}): weights, gradients and the means of AdamW alone take "
            f"{needed / 1e9:,.0f} GB, and {device.name} has {device.memory / 1e9:g}: give at most "
            f"{int(device.memory / BYTES_OF_TRAINING):,}, or `manyformer plan` with several devices"
        )


def _suite_advice(suite: SuiteRecord, tasks: Sequence[TaskRecord], needs: Needs, length: int) -> Advice:
    """The cases of a suite that were best on the tasks."""
    states = {case: state_at(costs, length) for case, costs in suite.costs.items()}
    minutes = {case: _mean_minutes(tasks, case) for case in suite.costs}
    excluded = {}
    for case, costs in suite.costs.items():
        reason = reason_against(needs, listed_recipes().get(costs.recipe), states[case], minutes[case])
        if reason:
            excluded[case] = reason
    source = f"{suite.name}, {suite.seeds} seeds"
    rows = [
        row for record in tasks for row in _suite_rows(record, suite.costs, states, source) if row.case not in excluded
    ]
    candidates = [_with_costs(candidate, suite, needs, length) for candidate in _best_candidates(rows)]
    limits = [*_suite_limits(suite, tasks, length), *budget_limits(needs)]
    return Advice(
        needs, tuple(candidates), tuple(rows), excluded, tuple(limits), next_commands(candidates, needs), suite.name
    )


def state_at(costs: CaseCosts, length: int) -> int | None:
    """The bytes of the state of a case at a length: by its growth, or else of the model, which is built."""
    listed = listed_recipes().get(costs.recipe)
    sizes = {cost.length: cost.state_bytes for cost in costs.lengths}
    grows = listed is not None and listed.card.state == "grows"
    size = state_by_growth(sizes, length, grows=grows)
    if size is not None or (sizes and set(sizes.values()) == {None}):
        return size
    # imports torch, which takes seconds
    from manyformer.analysis.comparisons.suite_report import state_bytes_at

    return state_bytes_at(costs.recipe, costs.keywords, length)


def _mean_minutes(tasks: Sequence[TaskRecord], case: str) -> float | None:
    """The minutes of a training of a case, the mean of the tasks and seeds; None where no time was kept."""
    measured = [score for record in tasks for score in record.results[EQUAL_STEPS].measured if score.case == case]
    return _mean([score.minutes for score in measured if score.minutes is not None])


def _suite_rows(
    task: TaskRecord, costs: Mapping[str, CaseCosts], states: Mapping[str, int | None], source: str
) -> list[AdviceRow]:
    """The rows of a task, best first."""
    column = task.results[EQUAL_STEPS]
    measure = f"{task.score} (%)" if task.score == "accuracy" else task.score
    rows = []
    for case, cost in costs.items():
        measured = [measurement.scores for measurement in column.measured if measurement.case == case]
        first = _mean([scores[0].get(task.score) for scores in measured if scores])
        if first is None:
            continue
        last = None
        if len(task.lengths) > 1:
            last = _mean([scores[-1].get(task.score) for scores in measured if scores])
        is_best = case == column.best or column.p_values.get(case, 0.0) >= SIGNIFICANCE_LEVEL
        row = AdviceRow(task.task, case, cost.recipe, first, last, is_best, states[case], cost.keywords, measure)
        rows.append(row._replace(source=source))
    # the results name their best case: the side that it stands on says whether less is better
    best = next((row.score for row in rows if row.case == column.best), None)
    less_is_better = best is not None and best < max(row.score for row in rows)
    return sorted(rows, key=lambda row: row.score if less_is_better else -row.score)


def _mean(values: Sequence[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    # a seed that diverged leaves no mean, as in the tables
    if numbers and all(map(isfinite, numbers)):
        return sum(numbers) / len(numbers)
    return None


def _best_candidates(rows: Sequence[AdviceRow]) -> list[Candidate]:
    """Three cases at most, whose rows were best, each with its own best row first.

    They are ordered by the number of tasks on which no other was significantly better, then by their mean places."""
    by_case: dict[str, list[AdviceRow]] = {}
    places: dict[str, list[int]] = {}
    # the rows of a task are together, the best first
    for number, row in enumerate(rows):
        by_case.setdefault(row.case, []).append(row)
        places.setdefault(row.case, []).append(number)
    tasks = len({row.task for row in rows})

    def order(case: str) -> tuple[int, int]:
        return -sum(row.is_best for row in by_case[case]), sum(places[case])

    candidates = []
    for case in sorted(by_case, key=order)[:MOST_CANDIDATES]:
        # best first, in the order of the tasks
        case_rows = sorted(by_case[case], key=lambda row: not row.is_best)
        best = sum(row.is_best for row in case_rows)
        reason = f"none was significantly better on {best} of {tasks} tasks"
        candidates.append(Candidate(case_rows[0].recipe, reason, case_rows[0], tuple(case_rows)))
    return candidates


def _with_costs(candidate: Candidate, suite: SuiteRecord, needs: Needs, length: int) -> Candidate:
    """The candidate with rows of its time, of its decoding and of other comparisons, and what the minutes allow."""
    assert candidate.row is not None
    costs = suite.costs[candidate.row.case]
    timed = [cost for cost in costs.lengths if cost.step_seconds]
    rows = list(candidate.rows)
    limits = []
    if timed:
        nearest = min(timed, key=lambda cost: abs(cost.length - length))
        seconds = nearest.step_seconds or 0.0
        task = f"training step of {nearest.length:,} tokens"
        row = candidate.row._replace(task=task, score=1e3 * seconds, longest_score=None, is_best=False)
        rows.append(row._replace(measure="time (ms)", source=f"{suite.name}, {costs.machine}"))
        if needs.minutes is not None and needs.device.name == CPU:
            tokens = needs.minutes * 60 / seconds * nearest.length / 1e6
            limits.append(f"{needs.minutes:g} minutes of a CPU's thread are at most {tokens:,.1f} M tokens")
    rows += _decoding_rows(candidate.recipe, length)
    rows += rows_of_recipe(candidate.recipe, LANGUAGE_MODEL, needs)
    return candidate._replace(rows=tuple(rows), limits=tuple(limits), published=published_of(candidate.recipe))


def _decoding_rows(recipe: str, length: int) -> Iterator[AdviceRow]:
    """The measured speed of decoding at the nearest length."""
    cells = [cell for cell in decoding_cells() if cell.label == recipe]
    if cells:
        cell = min(cells, key=lambda cell: abs(cell.length - length))
        source = "README.md, width 256, 4 layers, 1 thread"
        task = f"decoding after {cell.length:,} tokens"
        speed = 1 / cell.lower_quartile
        yield unscored_row(recipe, task, speed, "speed (tokens/s)", source)._replace(state_bytes=cell.memory)


def _suite_limits(suite: SuiteRecord, tasks: Sequence[TaskRecord], length: int) -> list[str]:
    """Where the rows end: the sizes of the models, the seeds and the lengths."""
    longest = max((max(task.lengths) for task in tasks if task.lengths), default=0)
    limits = [f"measured: {suite.title}; {suite.seeds} seeds, on {suite.machine}"]
    if longest < length:
        limits.append(
            f"these tasks were scored on sequences of up to {longest:,} tokens: of quality at {length:,} the rows say "
            "nothing; the size of the state there follows from the model"
        )
    timed = max((cost.length for costs in suite.costs.values() for cost in costs.lengths), default=0)
    if timed < length:
        limits.append(f"time and memory were measured at up to {timed:,} tokens")
    return [*limits, "models of this size, trained this long, on generated tasks: try the two best on your own data"]
