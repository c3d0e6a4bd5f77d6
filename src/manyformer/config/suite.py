"""Configuration of suites: the same cases compared on several tasks, with one frame and floors beside the scores."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue

from manyformer.base.errors import UserError, UserErrors
from manyformer.config.comparison import Comparison, ComparisonCase, ComparisonFile
from manyformer.config.load import RecipeLookup
from manyformer.config.load_comparison import find_comparison, read_cases, read_parts, take_mapping, validate_section
from manyformer.config.run_file import read_mapping
from manyformer.config.section import ConfigSection, PathText, PositiveInt, SettingConflict, TupleOrText
from manyformer.config.setting_layers import SettingError, SettingLayer

BudgetName = Literal["steps", "operations", "seconds"]
TASKS_KEY = "tasks"
"""The key that makes a comparison file a suite."""

COMPARED_KEYS = ("seeds", "score", "split", "trials")
"""Settings of a suite that are those of the comparison of every task, unless the task has its own."""


class SuiteFile(ConfigSection):
    """The settings of a suite besides its run, its cases and its tasks."""

    title: PathText
    """What is compared, in one line: the title of the tables and the figures."""
    reference: PathText
    """The case whose parameters, operations and seconds are those of all cases."""
    seeds: PositiveInt = 3
    """How many times the best trial of each case is trained; the data and the seeds are the same for all cases."""
    score: Annotated[tuple[PathText, ...], TupleOrText, Field(min_length=1)] = ("accuracy",)
    """Scores of the trained models, the main one first."""
    split: Literal["valid", "test"] = "test"
    """The held-out data that the models are scored on; the best trial is chosen on the validation data."""
    trials: dict[str, Annotated[list[JsonValue], Field(min_length=1)]] = Field(default_factory=dict)
    """Settings, each with the values that every case is trained with, such as `optim.lr`."""
    budgets: Annotated[tuple[BudgetName, ...], TupleOrText, Field(min_length=1)] = ("steps",)
    """What is equal for all cases: `steps` of the run, or the `operations` or `seconds` that these steps of the
    reference take. The other budgets train the best trials of equal steps, with other numbers of steps."""
    pretrain: Literal["none", "causal"] = "none"
    """`causal` also trains each case to predict the next token of the task's own inputs first (Amos et al. 2024,
    arXiv:2310.02980), and shows both scores."""
    lengths: Annotated[tuple[PositiveInt, ...], TupleOrText] = ()
    """Sequence lengths at which time, memory, operations and the state for decoding are measured."""

    def conflicts(self) -> Iterator[SettingConflict]:
        if "steps" not in self.budgets:
            yield SettingConflict(("budgets",), "must include steps: the others train its best trials")


class SuiteTaskFile(ComparisonFile):
    """The settings of a task of a suite besides its run."""

    floors: dict[str, float] = Field(default_factory=dict)
    """What little knowledge scores, by its name, such as `majority: 16.6`."""
    expectation: str = ""
    """What is published about the task, with the source."""
    kinds: Annotated[tuple[PathText, ...], TupleOrText] = ()
    """The abilities that the task tests, such as recall, for `manyformer advise`."""

    def conflicts(self) -> Iterator[SettingConflict]:
        yield from super().conflicts()
        if self.reference is not None:
            yield SettingConflict(("reference",), "is one for all tasks of a suite: set it beside `tasks:`")


@dataclass(frozen=True)
class SuiteTask:
    """One task of a suite: the comparison of all cases on it, and the same with pretraining if the suite has any.

    `pretrained` has two cases for each, the first of which is trained on the inputs alone."""

    name: str
    file: SuiteTaskFile
    comparison: Comparison
    pretrained: Comparison | None = None


@dataclass(frozen=True)
class Suite:
    """A validated suite: its settings and the comparison of each task."""

    name: str
    about: str
    file: SuiteFile
    tasks: tuple[SuiteTask, ...]

    @property
    def cases(self) -> list[str]:
        return [case.name for case in self.tasks[0].comparison.cases]


def is_suite(target: str | Path) -> bool:
    """Whether a comparison file, by its path or shipped name, is a suite: it names tasks."""
    # errors of the file are reported when it is loaded as what it is
    return TASKS_KEY in read_mapping(find_comparison(target)[1], "", "", []).data


def pretraining_name(case: str) -> str:
    """The name of the case that pretrains another."""
    return f"{case}, pretraining"


def load_suite(
    target: str | Path, overrides: Sequence[str] = (), *, recipes: RecipeLookup, chosen: Sequence[str] = ()
) -> Suite:
    """Load a suite from a file or by its shipped name; `overrides` (KEY=VALUE) apply to all runs.

    `chosen` names its cases and any other recipes, which get the suite's settings; without them all cases are taken.
    Raises UserErrors with every error in the file.
    """
    parts = read_parts(target, SuiteFile, ("cases", TASKS_KEY), "a suite has a run, cases and tasks", recipes)
    cases = _chosen_cases(parts.mappings["cases"], chosen, parts.file.reference)
    reader = _TaskReader(parts.name, parts.file, parts.layer, parts.base_layers, cases, overrides, recipes)
    tasks = parts.mappings[TASKS_KEY]
    loaded_tasks = tuple(
        reader.read(task, SettingLayer(dict(tasks.data[task] or {}), tasks.locations_below((task,))))
        for task in tasks.data
    )
    return Suite(parts.name, parts.about, parts.file, loaded_tasks)


def _chosen_cases(cases: SettingLayer, chosen: Sequence[str], reference: str) -> SettingLayer:
    """The chosen cases, the reference first; a case without a recipe is of the recipe of its name."""
    if reference not in cases.data:
        raise UserError(f"reference: '{reference}' must be one of the cases")
    # the reference is always compared, whichever cases are chosen
    names = dict.fromkeys([reference, *(chosen or cases.data)])
    settings = {name: {"recipe": name, **(cases.data.get(name) or {})} for name in names}
    return SettingLayer(settings, cases.locations)


@dataclass(frozen=True)
class _TaskReader:
    """Reads the comparisons of the tasks of a suite."""

    name: str
    suite: SuiteFile
    suite_layer: SettingLayer
    base_layers: list[SettingLayer]
    cases: SettingLayer
    overrides: Sequence[str]
    recipes: RecipeLookup

    def read(self, task: str, layer: SettingLayer) -> SuiteTask:
        """The task with the settings of its mapping over those of the suite. Raises UserErrors."""
        errors: list[SettingError] = []
        base_layers = [*self.base_layers, take_mapping(layer, "run", errors)]
        shared = {key: getattr(self.suite, key) for key in COMPARED_KEYS}
        data: dict[str, Any] = {"title": f"{self.suite.title}: {task}", **shared, **layer.data}
        file = validate_section(SuiteTaskFile, SettingLayer(data, layer.locations), ("run",), errors)
        if errors or file is None:
            raise UserErrors(dict.fromkeys(f"{error} (task {task})" for error in errors))

        def comparison(cases: SettingLayer) -> tuple[ComparisonCase, ...]:
            return read_cases(base_layers, cases, file, layer, self.overrides, self.recipes)

        name = f"{self.name}: {task}"
        pretrained = None
        if self.suite.pretrain != "none":
            pretrained = Comparison(name, file.expectation, file, comparison(self._with_pretraining()))
        return SuiteTask(task, file, Comparison(name, file.expectation, file, comparison(self.cases)), pretrained)

    def _with_pretraining(self) -> SettingLayer:
        """Each case after another one that is trained on the inputs of the task alone."""
        cases: dict[str, Any] = {}
        for name, settings in self.cases.data.items():
            # the same rows, of which the inputs themselves are predicted
            data = {**settings.get("data", {}), "targets": "inputs"}
            cases[pretraining_name(name)] = {**settings, "data": data}
            cases[name] = {**settings, "init_from": pretraining_name(name)}
        return SettingLayer(cases, self.cases.locations)
