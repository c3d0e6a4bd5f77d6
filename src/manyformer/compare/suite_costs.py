"""What the models of a suite cost at several lengths: time, memory, operations, and the state for decoding."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ConfigDict

from manyformer.bench import BenchCandidate, bench
from manyformer.compare.job_pool import describe_machine
from manyformer.compare.training_task import content_hash
from manyformer.config import RunConfig
from manyformer.files.json_records import JsonLines
from manyformer.model_summary import build_on_meta, state_bytes_after
from manyformer.recipes import get_recipe

ROUNDS = 3
MAX_SECONDS = 20.0
"""A forward pass or a step that takes longer is not measured at greater lengths."""


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
        key = content_hash([run.recipe, run.model, list(lengths), describe_machine(1)])
        if key not in store.entries:
            on_progress(f"measuring the costs of {name}")
            store.add(_measure(key, name, run, lengths))
        costs[name] = store.entries[key]
    return costs


def state_bytes_at(recipe: str, keywords: Mapping[str, Any], length: int) -> int | None:
    """The bytes of a model's state after `length` tokens; None if it has none or cannot have that length."""
    parameters = get_recipe(recipe).signature.parameters
    if "max_length" in parameters:
        longer = {"max_length": length}
    else:
        longer = {}
    try:
        return state_bytes_after(build_on_meta(recipe, {**keywords, **longer}), length)
    except ValueError:
        return None


def _measure(key: str, name: str, run: RunConfig, lengths: Sequence[int]) -> CaseCosts:
    candidate = BenchCandidate(name, run.recipe, dict(run.model))
    report = bench(
        [candidate],
        lengths,
        what=("forward", "step"),
        against=None,
        rounds=ROUNDS,
        max_seconds=MAX_SECONDS,
        device="cpu",
    )
    cells = {(cell.kind, cell.length): cell for cell in report.cells}
    costs = tuple(
        LengthCost(
            length,
            cells["forward", length].seconds,
            cells["step", length].seconds,
            cells["step", length].memory,
            cells["forward", length].flops,
            state_bytes_at(run.recipe, run.model, length),
        )
        for length in sorted(set(lengths))
    )
    return CaseCosts(key, name, run.recipe, dict(run.model), describe_machine(1), costs)
