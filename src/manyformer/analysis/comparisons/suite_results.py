"""The results of a suite as they are written and read again: scores of its tasks, and costs of its models by length.

Nothing here needs torch, so that results are read at once."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge
from pydantic import BaseModel, ConfigDict

from manyformer.base.files.json_records import DamagedFile, read_json, validate_json
from manyformer.config.shipped import SUITE_RESULTS

EQUAL_STEPS = "equal steps"
"""The results of the trainings with the steps of the suite's run; the others have the names of their budgets."""

RESULTS_FILE = "results.json"
DEFAULT_FOLDER = "comparisons"
"""Where results are unless a folder is given."""


@dataclass(frozen=True)
class LengthCost:
    """The cost of one sequence of `length` tokens: seconds of a forward pass and of a training step and the memory of
    the step in bytes, operations of the forward pass, and the bytes of the state after that many tokens."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    length: int
    forward_seconds: float | None = None
    step_seconds: float | None = None
    step_memory: int | None = None
    flops: int | None = None
    state_bytes: int | None = None


@dataclass(frozen=True)
class CaseCosts:
    """The costs of a case's model at each length, with the machine that they were measured on."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    key: str
    case: str
    recipe: str
    keywords: dict[str, Any]
    machine: str
    lengths: tuple[LengthCost, ...]

    def at(self, length: int) -> LengthCost | None:
        """The costs at a length, if they were measured."""
        return next((cost for cost in self.lengths if cost.length == length), None)


class LooseRecord(BaseModel):
    """A part of results, of which only the declared fields are read."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)


class MeasuredScore(LooseRecord):
    """A training of a case: its scores at each value of the sweep, and the minutes that it took."""

    case: str
    seed: int
    minutes: float | None = None
    scores: tuple[dict[str, float | None], ...]


class ResultColumn(LooseRecord):
    """The measurements of a task with one budget."""

    best: str | None
    p_values: dict[str, float]
    measured: tuple[MeasuredScore, ...]


class TaskRecord(LooseRecord):
    """A task of the results, with the abilities that it tests and the lengths that it was scored at."""

    task: str
    score: str
    kinds: tuple[str, ...]
    lengths: tuple[Annotated[int, Ge(1)], ...]
    floors: dict[str, float]
    results: dict[str, ResultColumn]


class SuiteRecord(LooseRecord):
    """The results of a suite as `results.json` has them."""

    name: str
    title: str
    machine: str
    seeds: int
    tasks: tuple[TaskRecord, ...]
    costs: dict[str, CaseCosts]


def read_results(path: Path) -> SuiteRecord:
    """The results of a suite in a file, or in a folder with `results.json`. Raises DamagedFile."""
    file = path / RESULTS_FILE if path.is_dir() else path
    record: SuiteRecord = validate_json(read_json(file, "the results of a suite"), SuiteRecord, file)
    for task in record.tasks:
        if EQUAL_STEPS not in task.results:
            raise DamagedFile(f"{file} is damaged: the task {task.task} has no results at {EQUAL_STEPS}")
    return record


def find_results() -> Path:
    """The results of the shipped suite of most families that was carried out here, or else those of the package."""
    folders = [Path(DEFAULT_FOLDER) / name for name in ("suite-full", "suite-quick")]
    return next((folder for folder in folders if (folder / RESULTS_FILE).is_file()), SUITE_RESULTS)
