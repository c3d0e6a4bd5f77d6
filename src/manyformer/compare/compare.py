"""`compare`: from a comparison's name or file to its report."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from manyformer.compare.claims import parse
from manyformer.compare.comparison_report import CaseMeasurement, ComparisonResult
from manyformer.compare.cost import StepCost, steps
from manyformer.compare.progress import ProgressMeter
from manyformer.compare.runner import ComparisonRunner
from manyformer.compare.scoring import check_score
from manyformer.config.comparison import Comparison, RecipeLookup, load_comparison
from manyformer.errors import UserError, UserErrors
from manyformer.model_summary import build_on_meta
from manyformer.recipes import get_recipe

FOLDER = "comparisons"


def read(target: str | Path, overrides: Sequence[str] = ()) -> Comparison:
    """The comparison that is meant, checked as far as can be without training. Raises UserErrors."""
    recipes = RecipeLookup(lambda name: get_recipe(name).signature, lambda name: get_recipe(name).card.task)
    comparison = load_comparison(target, overrides, recipes=recipes)
    names = [case.name for case in comparison.cases]
    file = comparison.file
    checks: list[tuple[str, Callable[[], object]]] = [
        *(("", partial(parse, text, names, comparison.values, file.score, file.cost)) for text in file.claims),
        *(("", partial(check_score, score, case.run)) for case in comparison.cases for score in file.score),
        *(
            (f"case {case.name}: ", partial(build_on_meta, case.run.recipe, case.run.model))
            for case in comparison.cases
        ),
    ]
    mistakes = []
    for where, check in checks:
        try:
            check()
        except ValueError as error:
            mistakes.append(f"{where}{error}")
    if mistakes:
        raise UserErrors(dict.fromkeys(mistakes))
    return comparison


def compare(
    target: str | Path | Comparison,
    overrides: Sequence[str] = (),
    *,
    seeds: int | None = None,
    out: str | Path | None = None,
    fresh: bool = False,
    each: Callable[[str], None] = lambda text: None,
    tell: Callable[[str], None] = lambda text: None,
) -> ComparisonResult:
    """Train and score every case of a comparison and write its table and picture below `out`.

    `target` is a shipped comparison's name or a file, `overrides` such as `["limits.steps=100"]` are laid over the runs
    of all cases. What was trained before in the same folder is kept, and an interrupted training goes on; `fresh` moves
    all of it aside. `each` hears what goes on, `tell` what is done. Raises UserError where something can be mended,
    `TrainingInterrupted` after Ctrl-C.
    """
    comparison = target if isinstance(target, Comparison) else read(target, overrides)
    folder = Path(out) if out is not None else Path(FOLDER) / comparison.name.replace("/", "-")
    count = comparison.file.seeds if seeds is None else seeds
    if count < 1:
        raise UserError(f"seeds ({count}) must be at least 1")
    if fresh:
        _set_aside(folder, tell)
    runner = ComparisonRunner(comparison, folder, count)
    runner.check()
    meter = ProgressMeter(runner.missing(), each, tell)
    measured = _in_order(comparison, list(runner.go(meter)))
    found = ComparisonResult(comparison, count, measured, _cost(comparison, runner, meter), _machine())
    return replace(found, files=tuple(found.save(folder)))


def _in_order(comparison: Comparison, measured: list[CaseMeasurement]) -> tuple[CaseMeasurement, ...]:
    names = [case.name for case in comparison.cases]
    return tuple(sorted(measured, key=lambda one: (names.index(one.case), one.seed)))


def _cost(comparison: Comparison, runner: ComparisonRunner, meter: ProgressMeter) -> dict[str, StepCost]:
    if not {"step", "memory"} & set(comparison.file.cost):
        return {}
    meter.glimpse("measuring steps", 1.0)
    runs = {case.name: runner.run(case, 0) for case in comparison.cases if case.trained_by is None}
    return steps({name: (run, Path(str(run.out))) for name, run in runs.items()})


def _set_aside(folder: Path, tell: Callable[[str], None]) -> None:
    if not folder.exists():
        return
    number = 1
    while (aside := folder.with_name(f"{folder.name}.old-{number}")).exists():
        number += 1
    folder.rename(aside)
    tell(f"the earlier comparison is now in {aside}")


def _machine() -> str:
    from manyformer import __version__

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "a CPU"
    return f"{device}, {torch.get_num_threads()} threads, torch {torch.__version__}, manyformer {__version__}"
