"""Curves of shipped runs that come with the package, to be drawn and printed beside those of the same run elsewhere.

They say nothing of the machine: losses by step, and the text that they are of. `benchmarks/shipped_curves.py` takes
them from finished runs."""

from collections.abc import Iterator, Sequence
from statistics import fmean

from pydantic import BaseModel, ConfigDict

from manyformer.analysis.figures.curves import RunCurves
from manyformer.base.files.json_records import JsonLines
from manyformer.base.files.text_tables import aligned_table
from manyformer.config import RunConfig
from manyformer.config.run_file import differences
from manyformer.config.shipped import SHIPPED_CURVES
from manyformer.training.run_folder import as_training_run

SCORE = "valid_bits_per_byte"


class ShippedCurve(BaseModel):
    """The metrics of a shipped run with one seed by step; `data` is its data as the run described it, since the text
    differs between versions of Python."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    key: str
    run: str
    seed: int
    data: str
    rows: tuple[dict[str, float], ...]

    @property
    def curves(self) -> RunCurves:
        """What is drawn of it."""
        return RunCurves("as shipped, each seed", list(self.rows))


def shipped_curves() -> list[ShippedCurve]:
    """All curves that come with the package."""
    return list(JsonLines(SHIPPED_CURVES, ShippedCurve, "the curve of a shipped run").entries.values())


def curves_of_same_run(run: RunConfig) -> list[ShippedCurve]:
    """Curves of the shipped run that this one is; none if its model, its data or its training is another."""
    curves = shipped_curves()
    same = {name for name in {curve.run for curve in curves} if is_same_run(as_training_run(name), run)}
    return [curve for curve in curves if curve.run in same]


def is_same_run(shipped: RunConfig, run: RunConfig) -> bool:
    """Whether two runs differ in nothing but the seed, the limits, and what is no part of learning and scoring."""
    # scores of other held-out rows are other scores
    is_scored_alike = shipped.evaluate.batches == run.evaluate.batches
    return is_scored_alike and not differences(shipped, run.model_copy(update={"seed": shipped.seed}))


def table_beside(shipped: Sequence[ShippedCurve], run: RunCurves) -> Iterator[str]:
    """The lines of a table of bits per byte by step: this run, and the mean of the shipped seeds with their range."""
    scores = dict(zip(*run.points(SCORE), strict=True))
    seeds = [dict(zip(*curve.curves.points(SCORE), strict=True)) for curve in shipped]
    steps = set(seeds[0]).intersection(*seeds)
    # the last step may be another one: where its time has ended the run
    steps |= {max(scores, default=max(steps))}
    rows = [["step", "this run", f"shipped, mean of {len(shipped)} seeds", "lowest", "highest"]]
    for step in sorted(steps):
        values = [seed[step] for seed in seeds if step in seed]
        cells = [f"{scores[step]:.3f}" if step in scores else "–"]
        cells += [f"{summary(values):.3f}" if values else "–" for summary in (fmean, min, max)]
        rows.append([f"{step:,.0f}", *cells])
    return aligned_table(rows, right=True)
