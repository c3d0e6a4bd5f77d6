"""`compare`: runs a comparison, given by name or file, and writes its report."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from manyformer.compare.claims import parse_claim
from manyformer.compare.comparison_report import ComparisonResult
from manyformer.compare.cost import StepCost, measure_steps
from manyformer.compare.draw_comparison import write_comparison
from manyformer.compare.progress import ProgressMeter
from manyformer.compare.runner import ComparisonRunner
from manyformer.compare.scoring import check_score
from manyformer.config.comparison import Comparison, load_comparison
from manyformer.errors import UserError, UserErrors
from manyformer.model_summary import build_on_meta
from manyformer.plugins import import_for_run
from manyformer.stop_signals import resumable
from manyformer.train.run_folder import recipe_lookup, rename_aside
from manyformer.version import VERSION

DEFAULT_FOLDER = "comparisons"


def read_comparison(target: str | Path, overrides: Sequence[str] = ()) -> Comparison:
    """Load a comparison and check its runs, scores and claims without training. Raises UserErrors."""
    comparison = load_comparison(target, overrides, recipes=recipe_lookup(import_for_run))
    names = [case.name for case in comparison.cases]
    file = comparison.file
    checks: list[tuple[str, Callable[[], object]]] = [
        *(("", partial(parse_claim, text, names, comparison.values, file.score, file.cost)) for text in file.claims),
        *(("", partial(check_score, score, case.run)) for case in comparison.cases for score in file.score),
        *(
            (f"case {case.name}: ", partial(build_on_meta, case.run.recipe, case.run.model))
            for case in comparison.cases
        ),
    ]
    errors = []
    for prefix, check in checks:
        try:
            check()
        except ValueError as error:
            errors.append(f"{prefix}{error}")
    if errors:
        raise UserErrors(dict.fromkeys(errors))
    return comparison


@resumable()
def compare(
    target: str | Path | Comparison,
    overrides: Sequence[str] = (),
    *,
    seeds: int | None = None,
    out: str | Path | None = None,
    fresh: bool = False,
    on_progress: Callable[[str], None] = lambda text: None,
    log: Callable[[str], None] = lambda text: None,
) -> ComparisonResult:
    """Train and score every case of a comparison and write its table and picture below `out`.

    `target` is a shipped comparison's name or a file; `overrides` such as `["limits.steps=100"]` apply to the runs of
    all cases. Finished trainings in the same folder are reused, and an interrupted training resumes; `fresh` moves them
    aside. `on_progress` gets a line about the current activity, `log` one about each finished training. Raises
    UserError for invalid settings, `TrainingInterrupted` after Ctrl-C or SIGTERM.
    """
    comparison = target if isinstance(target, Comparison) else read_comparison(target, overrides)
    folder = Path(out) if out is not None else Path(DEFAULT_FOLDER) / comparison.name.replace("/", "-")
    seed_count = comparison.file.seeds if seeds is None else seeds
    if seed_count < 1:
        raise UserError(f"seeds ({seed_count}) must be at least 1")
    if fresh and folder.exists():
        log(f"the earlier comparison is now in {rename_aside(folder)}")
    runner = ComparisonRunner(comparison, folder, seed_count)
    runner.check()
    meter = ProgressMeter(runner.count_missing(), on_progress, log)
    order = [case.name for case in comparison.cases]
    measurements = sorted(runner.measure_all(meter), key=lambda measurement: order.index(measurement.case))
    costs = _measure_costs(comparison, runner, meter)
    result = ComparisonResult(comparison, seed_count, tuple(measurements), costs, _describe_machine())
    return replace(result, files=tuple(write_comparison(result, folder)))


def _measure_costs(comparison: Comparison, runner: ComparisonRunner, meter: ProgressMeter) -> dict[str, StepCost]:
    if not {"step", "memory"} & set(comparison.file.cost):
        return {}
    meter.report_progress("measuring steps", 1.0)
    cases = [case for case in comparison.cases if case.trained_by is None]
    return measure_steps({case.name: (runner.run(case, 0), runner.folder_of(case, 0)) for case in cases})


def _describe_machine() -> str:

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "a CPU"
    return f"{device}, {torch.get_num_threads()} threads, torch {torch.__version__}, manyformer {VERSION}"
