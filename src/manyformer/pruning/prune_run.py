"""Pruning of a trained run: its heads are removed in steps, scored after each, and what remains is a run."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from manyformer.data.kind import no_log
from manyformer.errors import UserError
from manyformer.evaluate.eval_data import open_run
from manyformer.exact_shares import round_share
from manyformer.files.unfinished_folder import check_unfinished, unfinished_folder
from manyformer.models import Model
from manyformer.multi_head.head_gates import format_heads, gated_heads
from manyformer.pruning.head_rankings import HeadRanking, ImportanceFn
from manyformer.pruning.held_out_scores import HeldOutScores, held_out_scores
from manyformer.pruning.pruned_run import check_prunable, write_pruned_run
from manyformer.pruning.quality_curve import CURVE_FILE, CURVE_PICTURE, PruningPoint, QualityCurve
from manyformer.pruning.removable_heads import (
    HeadUnit,
    RemovableHeads,
    closed_gates,
    count_heads,
    heads_by_layer,
    removable_heads,
)
from manyformer.type_aliases import LogFn

STEP_SHARE = 0.1
"""The share of all heads that one step removes (Michel et al. 2019, section 4.1)."""

IMPORTANCE_BATCHES = 32
"""The validation batches from which importance is computed, unless there are fewer."""


class PruningResult(NamedTuple):
    """The pruned model and its folder, its removed heads by layer, and the scores after each step."""

    out: Path
    model: Model
    removed: dict[str, tuple[int, ...]]
    curve: QualityCurve


def prune_run(
    run: str | Path,
    ranking: HeadRanking,
    *,
    keep: int,
    out: str | Path,
    part: str | None = None,
    device: str | None = None,
    on_point: Callable[[PruningPoint], None] = lambda point: None,
    log: LogFn = no_log,
) -> PruningResult:
    """Prune the heads of a trained run until `keep` remain, and write the pruned run into the folder `out`.

    `part` selects layers by the beginning of their names, such as "encoder"; heads of others are not counted. A tenth
    of the heads is removed at a time, those that `ranking` calls least important, and the model is scored on the
    validation data after each step; `on_point` is called with each score, `log` with a line for what people should
    know. Raises UserError if there are not more heads
    than that, and if `out` exists and is not what an interruption of the same call left, which goes on."""
    trained, folder = open_run(run), Path(out)
    where = "" if part is None else f" in {part}"
    work = f"prune {trained.folder} to {keep} heads{where} by {ranking.name}"
    if check_unfinished(folder, work):
        log(f"going on with {folder}, which an interruption left unfinished")
    model = trained.load_model(device)
    removable = removable_heads(model, part)
    check_prunable(model)
    total = count_heads(removable.units)
    if not removable.minimum <= keep < total:
        bounds = f"from {removable.minimum} to {total - 1}"
        raise UserError(f"{keep} heads cannot be kept of {total}{where}: the number must be {bounds}")
    with unfinished_folder(folder, work):
        weights, importance = ranking.rank(trained, part, folder)
        if weights != trained.folder:
            model = open_run(weights).load_model(device)
        steps = _PruningSteps(model, removable, importance, held_out_scores(trained), keep)
        removed, points = list[HeadUnit](), [steps.score(())]
        on_point(points[0])
        while units := steps.next_units(removed):
            removed += units
            points.append(steps.score(removed))
            on_point(points[-1])
        curve = QualityCurve(
            how=ranking.name, part=part, metric=trained.config.evaluate.metric, total=total, points=points
        )
        removed_heads = heads_by_layer(removed)
        pruned = write_pruned_run(folder, trained, weights, removed_heads)
        curve.write(folder / CURVE_FILE)
        curve.draw(folder / CURVE_PICTURE)
    return PruningResult(folder, pruned, removed_heads, curve)


class _PruningSteps(NamedTuple):
    """The model to prune, with everything that its steps need."""

    model: Model
    removable: RemovableHeads
    importance: ImportanceFn
    held_out: HeldOutScores
    keep: int

    def next_units(self, removed: list[HeadUnit]) -> list[HeadUnit]:
        """The units to remove in the next step."""
        batches = self.held_out.batches
        with gated_heads(self.model, closed_gates(self.model, removed)):
            first_batches = list(itertools.islice(batches, IMPORTANCE_BATCHES))
            importance = self.importance(self.model, first_batches, batches.rows_continue)
        step = max(1, round_share(STEP_SHARE, count_heads(self.removable.units)))
        return self.removable.least_important(importance, removed, keep=self.keep, step=step)

    def score(self, removed: list[HeadUnit] | tuple[()]) -> PruningPoint:
        """The point of the curve without these units."""
        with gated_heads(self.model, closed_gates(self.model, removed)):
            scores = self.held_out.of(self.model)
        heads = count_heads(self.removable.units) - count_heads(removed)
        return PruningPoint(heads, format_heads(heads_by_layer(removed)), scores)
