"""Advice on which recipe to take: the measured rows of a suite that fit a task, a length and a memory."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from annotated_types import Ge
from pydantic import BaseModel, ConfigDict

from manyformer.analysis.comparisons.claims import SIGNIFICANCE_LEVEL
from manyformer.analysis.comparisons.scoring import score_kind
from manyformer.analysis.comparisons.suite_report import EQUAL_STEPS, CaseCosts, state_bytes_at
from manyformer.base.errors import UserError, suggest_names
from manyformer.base.files.json_records import DamagedFile, read_json, validate_json
from manyformer.models.scores import is_comparable, rank_key

RESULTS_FILE = "results.json"


class _Loose(BaseModel):
    """A part of the results, of which only the declared fields are read."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)


class MeasuredScore(_Loose):
    """A training of a case: its scores at each value of the sweep, and the minutes that it took."""

    case: str
    seed: int
    minutes: float | None = None
    scores: tuple[dict[str, float | None], ...]


class ResultColumn(_Loose):
    """The measurements of a task with one budget."""

    best: str | None
    p_values: dict[str, float]
    measured: tuple[MeasuredScore, ...]


class TaskRecord(_Loose):
    """A task of the results, with the abilities that it tests and the lengths that it was scored at."""

    task: str
    score: str
    kinds: tuple[str, ...]
    lengths: tuple[Annotated[int, Ge(1)], ...]
    floors: dict[str, float]
    results: dict[str, ResultColumn]


class SuiteRecord(_Loose):
    """The results of a suite as `results.json` has them."""

    name: str
    title: str
    machine: str
    seeds: int
    tasks: tuple[TaskRecord, ...]
    costs: dict[str, CaseCosts]


class AdviceRow(NamedTuple):
    """A case with its scores on a task and the bytes of its state at the requested length.

    `is_best` says that no case is significantly better; `longest_score` is that at the greatest length, None where the
    task has only one."""

    task: str
    case: str
    recipe: str
    score: float
    longest_score: float | None
    is_best: bool
    state_bytes: int | None
    keywords: dict[str, Any]


class Candidate(NamedTuple):
    """A recipe to take, why, and the measured row that this rests on; None where nothing was measured."""

    recipe: str
    reason: str
    row: AdviceRow | None


MOST_CANDIDATES = 3


@dataclass(frozen=True)
class Advice:
    """The rows that fit, best first for each task, the cases that do not fit with the reason, and the limits."""

    rows: tuple[AdviceRow, ...]
    excluded: dict[str, str]
    limits: tuple[str, ...]
    suite: SuiteRecord


def read_results(path: Path) -> SuiteRecord:
    """The results of a suite in a file, or in a folder with `results.json`. Raises DamagedFile."""
    file = path / RESULTS_FILE if path.is_dir() else path
    record: SuiteRecord = validate_json(read_json(file, "the results of a suite"), SuiteRecord, file)
    for task in record.tasks:
        if EQUAL_STEPS not in task.results:
            raise DamagedFile(f"{file} is damaged: the task {task.task} has no results at {EQUAL_STEPS}")
    return record


def advise(suite: SuiteRecord, *, length: int, task: str | None = None, memory: int | None = None) -> Advice:
    """The cases of a suite for sequences of `length` tokens, on the tasks named or tested by `task` (None: all).

    Cases whose state for decoding takes more than `memory` bytes at that length are left out. Scores are quoted as they
    were measured: nothing is extrapolated but the size of the state, which follows from the model. Raises UserError for
    an unknown task."""
    names = [record.task for record in suite.tasks]
    kinds = list(dict.fromkeys(kind for record in suite.tasks for kind in record.kinds))
    tasks = [record for record in suite.tasks if task in (None, record.task, *record.kinds)]
    if not tasks:
        raise UserError(
            f"the suite {suite.name} has no task '{task}'; {suggest_names(task or '', dict.fromkeys([*names, *kinds]))}"
        )
    states = {case: _state_at(costs, length) for case, costs in suite.costs.items()}
    excluded = {case: reason for case in suite.costs if (reason := _reason_against(states[case], length, memory))}
    rows = [row for record in tasks for row in _rows(record, suite.costs, states) if row.case not in excluded]
    return Advice(tuple(rows), excluded, tuple(_limits(suite, tasks, length)), suite)


def best_candidates(advice: Advice) -> list[Candidate]:
    """Three recipes at most, whose rows were best on the tasks of the advice, each with its own best row.

    They are ordered by the number of tasks on which no other was significantly better, then by their mean places."""
    by_case: dict[str, list[AdviceRow]] = {}
    places: dict[str, list[int]] = {}
    # the rows of a task are together, the best first
    for number, row in enumerate(advice.rows):
        by_case.setdefault(row.case, []).append(row)
        places.setdefault(row.case, []).append(number)
    tasks = len({row.task for row in advice.rows})

    def order(case: str) -> tuple[int, int]:
        return -sum(row.is_best for row in by_case[case]), sum(places[case])

    candidates = []
    for case in sorted(by_case, key=order)[:MOST_CANDIDATES]:
        rows = by_case[case]
        best = sum(row.is_best for row in rows)
        # the rows of a case are in the order of the tasks, of which the first that it is best at says most
        row = next((row for row in rows if row.is_best), rows[0])
        candidates.append(Candidate(row.recipe, f"none was significantly better on {best} of {tasks} tasks", row))
    return candidates


def _state_at(costs: CaseCosts, length: int) -> int | None:
    """The bytes of the state at a length; a state that did not grow between the two greatest measured ones is full."""
    greatest = sorted(costs.lengths, key=lambda cost: cost.length)[-2:]
    # without building a model: a full window stays as large at any length
    if len(greatest) == 2 and greatest[0].state_bytes == greatest[1].state_bytes and length >= greatest[0].length:
        return greatest[1].state_bytes
    return state_bytes_at(costs.recipe, costs.keywords, length)


def _reason_against(state: int | None, length: int, memory: int | None) -> str | None:
    if memory is None:
        return None
    if state is None:
        return f"it has no state for decoding at length {length:,}"
    if state > memory:
        return f"its state takes {state:,} bytes at length {length:,}"
    return None


def _rows(task: TaskRecord, costs: Mapping[str, CaseCosts], states: Mapping[str, int | None]) -> list[AdviceRow]:
    """The rows of a task, best first."""
    column = task.results[EQUAL_STEPS]
    lower_is_better = score_kind(task.score).lower_is_better
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
        rows.append(AdviceRow(task.task, case, cost.recipe, first, last, is_best, states[case], cost.keywords))
    return sorted(rows, key=lambda row: rank_key(row.score, lower_is_better=lower_is_better))


def _mean(values: Sequence[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    # a seed that diverged leaves no mean, as in the tables
    if not all(map(is_comparable, numbers)):
        return None
    if numbers:
        return sum(numbers) / len(numbers)
    return None


def _limits(suite: SuiteRecord, tasks: Sequence[TaskRecord], length: int) -> list[str]:
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
