"""Equal operations and equal seconds: the steps of each case are those that cost as much as the reference's."""

from collections.abc import Mapping
from dataclasses import replace

from manyformer.compare.planner import TrainingTiming
from manyformer.config import RunConfig
from manyformer.config.comparison import CaseTrial, Comparison, ComparisonCase
from manyformer.config.suite import BudgetName


def with_budget(
    comparison: Comparison,
    budget: BudgetName,
    reference: str,
    timings: Mapping[tuple[str, str], TrainingTiming],
    best: Mapping[str, int],
) -> Comparison:
    """The comparison with the best trial of each case (the first, where it is not known) and another number of steps.

    Each case takes as many steps as cost what the steps of `reference` cost: by `budget` in operations of a training
    step, or in its seconds on this machine. The schedule is stretched with the steps."""

    def cost(case: str) -> float:
        timing = timings[comparison.name, case]
        return timing.step_flops if budget == "operations" else timing.step_seconds

    def changed(case: ComparisonCase) -> ComparisonCase:
        factor = cost(reference) / cost(case.name)
        trial = case.trials[best.get(case.name, 0)]
        points = tuple(None if point is None else _stretched(point, factor) for point in trial.points)
        return replace(case, trials=(CaseTrial(trial.label, _stretched(trial.run, factor), points),))

    return replace(comparison, cases=tuple(map(changed, comparison.cases)))


def _stretched(run: RunConfig, factor: float) -> RunConfig:
    """The run with its steps, those of warm-up and those of the schedule multiplied by `factor`."""
    assert run.limits.steps is not None
    limits = run.limits.model_copy(update={"steps": _scaled(run.limits.steps, factor)})
    changes = {
        name: _scaled(steps, factor)
        for name in ("warmup", "steps")
        if (steps := getattr(run.schedule, name, None)) is not None
    }
    return run.model_copy(update={"limits": limits, "schedule": run.schedule.model_copy(update=changes)})


def _scaled(steps: int, factor: float) -> int:
    return max(1, round(steps * factor))
