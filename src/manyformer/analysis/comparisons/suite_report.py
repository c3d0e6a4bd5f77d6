"""The result of a suite: tables with ranges, significance, floors and costs, as text, Markdown and JSON."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from manyformer.analysis.comparisons.claims import SIGNIFICANCE_LEVEL, holm_adjusted, paired_t_test
from manyformer.analysis.comparisons.comparison_report import (
    NO_VALUE,
    ComparisonResult,
    spell_duration,
)
from manyformer.analysis.comparisons.scoring import score_kind
from manyformer.analysis.comparisons.suite_results import EQUAL_STEPS, CaseCosts
from manyformer.analysis.comparisons.training_task import CaseFailure
from manyformer.base.files.json_text import json_text
from manyformer.base.files.text_tables import Table, printable
from manyformer.config.suite import Suite, SuiteTask
from manyformer.data.generated.synthetic_floors import GuessFloors
from manyformer.recipes import get_recipe
from manyformer.recipes.parts.model_summary import state_bytes_after
from manyformer.recipes.parts.registry import build_on_meta

COST_TABLES = (
    ("State for decoding in kB", "state_bytes", 1e-3),
    ("Forward pass in ms", "forward_seconds", 1e3),
    ("Training step in ms", "step_seconds", 1e3),
    ("Memory of a training step in MB", "step_memory", 1e-6),
    ("Millions of operations of a forward pass", "flops", 1e-6),
)
"""The title of each table of costs, the attribute of the costs at a length, and a factor."""


def state_bytes_at(recipe: str, keywords: Mapping[str, Any], length: int) -> int | None:
    """The bytes of a model's state after `length` tokens; None if it has none or cannot have that length."""
    keywords = dict(keywords)
    if "max_length" in get_recipe(recipe).signature.parameters:
        # a table of positions is made as long as needed: it is no part of the state
        keywords["max_length"] = length
    try:
        return state_bytes_after(build_on_meta(recipe, keywords), length)
    except ValueError:
        return None


@dataclass(frozen=True)
class TaskResult:
    """The results of a task by what is equal for all cases: `equal steps`, and other budgets or pretraining.

    `guesses` are the floors of generated data, None where the main score is not the accuracy."""

    task: SuiteTask
    results: dict[str, ComparisonResult]
    guesses: GuessFloors | None = None

    @property
    def floors(self) -> dict[str, float]:
        """What little knowledge scores, by its name: the floors of the file, and those measured on generated data."""
        if self.guesses is None:
            return self.task.file.floors
        majority, shortcut = self.guesses
        return {**self.task.file.floors, "majority": majority.accuracy, "best shortcut": shortcut.accuracy}

    @property
    def score(self) -> str:
        """The main score."""
        return self.task.file.score[0]

    @property
    def lengths(self) -> list[int]:
        """The lengths of the rows that the first case is scored on, one for each value of the sweep."""
        points = self.task.comparison.cases[0].points
        return [point.data.row_length for point in points if point is not None]

    def best_case(self, cases: Sequence[str], column: str = EQUAL_STEPS) -> str | None:
        """The case with the best mean."""
        means = {case: mean for case in cases if (mean := self.results[column].mean(case, self.score)) is not None}
        if score_kind(self.score).lower_is_better:
            choose = min
        else:
            choose = max
        if means:
            return choose(means, key=lambda case: means[case])
        return None

    def p_values(self, cases: Sequence[str], column: str = EQUAL_STEPS) -> dict[str, float]:
        """The adjusted p-value of each other case against the best, paired over seeds, if it has all seeds."""
        tests = self._tests(cases, column)
        return holm_adjusted({case: p_value for case, p_value in tests.items() if p_value is not None})

    def untested_cases(self, cases: Sequence[str], column: str = EQUAL_STEPS) -> list[str]:
        """The cases that differ from the best by the same amount with every seed, of which a t-test says nothing."""
        tests = self._tests(cases, column)
        best = self.best_case(cases, column)
        seeds = 0
        if best is not None:
            # with one seed nothing can be tested, which is no news about a case
            seeds = len(self.results[column].values(best, self.score))
        return [case for case, p_value in tests.items() if p_value is None and seeds > 1]

    def _tests(self, cases: Sequence[str], column: str) -> dict[str, float | None]:
        """The p-value of each other case that has all seeds against the best; None where the test has no value."""
        best = self.best_case(cases, column)
        if best is None:
            return {}
        reference = self.results[column].values(best, self.score)
        values = {case: self.results[column].values(case, self.score) for case in cases if case != best}
        return {
            # only cases with all seeds: pairs are scores of the same seed
            case: paired_t_test(reference, scores)
            for case, scores in values.items()
            if len(scores) == len(reference)
        }


@dataclass(frozen=True)
class SuiteResult:
    """A suite and what was measured; `missing` is the number of trainings that are not measured yet."""

    suite: Suite
    seeds: int
    tasks: tuple[TaskResult, ...]
    costs: dict[str, CaseCosts] = field(default_factory=dict)
    missing: int = 0
    machine: str = ""
    planned_seconds: float = 0.0
    seconds: float = 0.0
    files: tuple[Path, ...] = ()

    @property
    def cases(self) -> list[str]:
        return self.suite.cases

    @property
    def failures(self) -> list[tuple[str, CaseFailure]]:
        """The trainings that have failed, each with the name of its task."""
        return [
            (task.task.name, failure)
            for task in self.tasks
            for result in task.results.values()
            for failure in result.failures
        ]

    @property
    def tables(self) -> list[Table]:
        """A table of the main score of all tasks for each budget, and one of each kind of cost."""
        columns = dict.fromkeys(column for task in self.tasks for column in task.results)
        tables = [self._score_table(column) for column in columns]
        return [*tables, *(self._cost_tables() if self.costs else ())]

    @property
    def claims(self) -> list[str]:
        """Whether each claim of a task holds at equal steps, in words."""
        return [f"{task.task.name}: {claim}" for task in self.tasks for claim in task.results[EQUAL_STEPS].claims]

    @property
    def notes(self) -> list[str]:
        """What the numbers are, and what is missing."""
        split = self.suite.file.split
        notes = [
            f"mean (lowest-highest) over {self.seeds} seeds on the {split} data; the best of the trials, of which all "
            "cases have equally many, is chosen on the validation data of the first seed",
            f"*: the best, and those that a paired t-test over the seeds does not separate from it (p >= "
            f"{SIGNIFICANCE_LEVEL} after Holm's adjustment)",
        ]
        notes += [
            f"{task.task.name}: {task.task.file.expectation}" for task in self.tasks if task.task.file.expectation
        ]
        notes += [f"{task.task.name}: {task.guesses.summary_line}" for task in self.tasks if task.guesses is not None]
        notes += [
            f"{task.task.name}: {reason}" for task in self.tasks for reason in task.results[EQUAL_STEPS].missing_reasons
        ]
        notes += [
            f"{task.task.name}: {', '.join(untested)} differ from the best by the same amount with every seed, "
            "so that a t-test has no value"
            for task in self.tasks
            if (untested := task.untested_cases(self.cases))
        ]
        notes += [f"{task}: {failure.name} has failed: {failure.reason}" for task, failure in self.failures]
        if self.missing:
            notes.append(f"{self.missing} trainings are not measured yet; the same command continues")
        elif self.seconds:
            planned = spell_duration(self.planned_seconds)
            notes.append(f"planned: {planned}; trained in {spell_duration(self.seconds)}")
        return notes

    def to_markdown(self) -> str:
        """The report as Markdown, with links to the figures in the same folder."""
        lines = [f"# {self.suite.file.title}", "", *([self.suite.about, ""] if self.suite.about else [])]
        for table in [*self.tables, *map(self._task_table, self.tasks)]:
            lines += [f"## {table.title}", "", *table.markdown, ""]
        lines += [f"- {note}" for note in self.notes] + [""]
        lines += [f"- {claim}" for claim in self.claims] + [""]
        lines += [f"![{path.stem}]({path.name})\n" for path in self.files if path.suffix == ".png"]
        return printable("\n".join([*lines, f"Measured on {self.machine}.", ""]))

    def to_json(self) -> str:
        """All results as JSON: for each task and budget the scores of each case, the tests, and the costs."""
        content = {
            "name": self.suite.name,
            "title": self.suite.file.title,
            "seeds": self.seeds,
            "missing": self.missing,
            "machine": self.machine,
            "planned_seconds": self.planned_seconds,
            "seconds": self.seconds,
            "tasks": [
                {
                    "task": task.task.name,
                    "score": task.score,
                    "kinds": list(task.task.file.kinds),
                    "lengths": task.lengths,
                    "floors": task.floors,
                    "expectation": task.task.file.expectation,
                    "results": {column: self._column_record(task, column) for column in task.results},
                }
                for task in self.tasks
            ],
            "costs": {case: asdict(costs) for case, costs in self.costs.items()},
        }
        return json_text(content, indent=2) + "\n"

    def _column_record(self, task: TaskResult, column: str) -> dict[str, Any]:
        result = task.results[column]
        return {
            "best": task.best_case(self.cases, column),
            "p_values": task.p_values(self.cases, column),
            "measured": [asdict(m) for case in self.cases for m in result.measurements_of(case)],
            "trials": [asdict(trial) for trial in result.trials],
            "claims": [verdict._asdict() for verdict in result.verdicts],
        }

    def _score_table(self, column: str) -> Table:
        tasks = [task for task in self.tasks if column in task.results]
        rows = [[case, *(self._cell(task, column, case) for task in tasks)] for case in self.cases]
        floors = dict.fromkeys(name for task in tasks for name in task.floors)
        # floors stand in the table itself, because a score says little without what chance reaches
        rows += [[f"baseline: {name}", *(_number(task.floors.get(name)) for task in tasks)] for name in floors]
        title = f"{self.suite.file.score[0].replace('_', ' ').capitalize()} at {column}"
        return Table(title, ["case", *(task.task.name for task in tasks)], rows)

    def _cell(self, task: TaskResult, column: str, case: str) -> str:
        values = task.results[column].values(case, task.score)
        mean = task.results[column].mean(case, task.score)
        if mean is None:
            return NO_VALUE
        mark = " *" if self._is_best(task, column, case) else ""
        digits = score_kind(task.score).digits
        span = ""
        if len(values) > 1:
            span = f" ({min(values):.{digits}f}-{max(values):.{digits}f})"
        return f"{mean:.{digits}f}{span}{mark}"

    def _is_best(self, task: TaskResult, column: str, case: str) -> bool:
        """Whether no case is significantly better."""
        p_value = task.p_values(self.cases, column).get(case)
        return case == task.best_case(self.cases, column) or (p_value is not None and p_value >= SIGNIFICANCE_LEVEL)

    def _task_table(self, task: TaskResult) -> Table:
        """The table of one task: every score at every value of the sweep, the best trial, and the p-value."""
        result = task.results[EQUAL_STEPS]
        p_values = task.p_values(self.cases)
        rows = []
        for case, cells in zip(result.cases, result.rows, strict=True):
            trial = next((m.trial for m in result.measurements_of(case)), "")
            p_value = p_values.get(case)
            rows.append([*cells, trial or NO_VALUE, NO_VALUE if p_value is None else f"{p_value:.3f}"])
        return Table(f"Task: {task.task.name}", [*result.headers, "best trial", "p against the best"], rows)

    def _cost_tables(self) -> Iterator[Table]:
        """A table for each kind of cost, with a column for each length."""
        lengths = sorted({cost.length for costs in self.costs.values() for cost in costs.lengths})
        headers = ["case", "parameters", *(f"at {length:,}" for length in lengths)]
        for title, attribute, factor in COST_TABLES:
            rows = []
            for case in self.cases:
                costs = [self.costs[case].at(length) if case in self.costs else None for length in lengths]
                values = [None if cost is None else getattr(cost, attribute) for cost in costs]
                cells = [_number(None if value is None else value * factor) for value in values]
                rows.append([case, self._parameters(case), *cells])
            yield Table(f"{title}, one sequence by its length", headers, rows)

    def _parameters(self, case: str) -> str:
        measurements = self.tasks[0].results[EQUAL_STEPS].measurements_of(case)
        return next((f"{m.parameters:,}" for m in measurements if m.parameters is not None), NO_VALUE)


def _number(value: float | None) -> str:
    """Three significant digits, or all digits before the point."""
    if value is None:
        return NO_VALUE
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"
