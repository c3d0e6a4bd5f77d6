"""Pruning of a trained run: its heads are removed in steps, scored after each, and what remains is a run."""

import copy
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, NamedTuple

import torch

from manyformer.api import load
from manyformer.batches import Batch
from manyformer.config import RUN_FILE, EvaluateConfig, RunConfig, dump_run
from manyformer.data.epochs import HeldOutBatches
from manyformer.data.kind import no_log
from manyformer.errors import UserError
from manyformer.evaluate.eval_data import TrainedRun, open_run
from manyformer.exact_shares import round_share
from manyformer.files.atomic_files import atomic_write_text, report_disk_full
from manyformer.files.json_records import AS_OBJECT, Count, FileRecord
from manyformer.files.verified_folder import check_unfinished, unfinished_folder
from manyformer.models import BatchScore, Model
from manyformer.models.model import CarriedState
from manyformer.models.model_files import copy_tokenizers, replacement_folder
from manyformer.multi_head.head_gates import (
    RemovedHeads,
    add_heads,
    format_heads,
    gated_heads,
    parse_heads,
    remove_heads,
)
from manyformer.pruning.head_rankings import HeadRanking, ImportanceFn
from manyformer.pruning.removable_heads import (
    HeadUnit,
    RemovableHeads,
    closed_gates,
    count_heads,
    heads_by_layer,
    removable_heads,
)
from manyformer.recipes import get_recipe
from manyformer.recipes.attention_keywords import REMOVED_HEADS
from manyformer.train.build_model import open_run_data
from manyformer.train.process_group import SINGLE_PROCESS_GROUP
from manyformer.train.validation import Validator
from manyformer.training_hooks import eval_mode
from manyformer.type_aliases import LogFn
from manyformer.view.figures import panels, write_picture

CURVE_FILE = "pruning.json"
CURVE_PICTURE = "pruning.png"


class PruningPoint(NamedTuple):
    """The scores on the validation data with this number of heads; `removed` is text for `parse_heads`."""

    heads: int
    removed: str
    scores: dict[str, float]


class QualityCurve(FileRecord):
    """The content of pruning.json: the points from all heads down, the way of ranking and the pruned part."""

    title = "the scores of a pruned model"
    format_number = 1
    how: str
    part: str | None
    metric: str
    total: Count
    points: list[Annotated[PruningPoint, AS_OBJECT]]

    def draw(self, path: Path) -> None:
        """Draw the metric against the number of heads."""
        from matplotlib.ticker import MaxNLocator

        figure, (axis,) = panels(1, 1)
        heads, values = zip(*((point.heads, point.scores[self.metric]) for point in self.points))
        axis.plot(heads, values, marker="o", ms=4, lw=1.4)
        axis.axhline(values[0], color="#999999", lw=0.8, ls="--")
        where = "" if self.part is None else f" in {self.part}"
        axis.set(xlabel=f"heads of {self.total}{where}, removed by {self.how}", ylabel=f"{self.metric} (validation)")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.invert_xaxis()
        write_picture(figure, path)


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
    trained = open_run(run)
    folder = Path(out)
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
        removed = list[HeadUnit]()
        points = [steps.score(())]
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


class HeldOutScores(NamedTuple):
    """The validation data of a run, whose scores `of` a model are computed on."""

    run: RunConfig
    batches: HeldOutBatches

    def of(self, model: Model) -> dict[str, float]:
        """The scores of a model, without dropout."""

        def begin_pass(*, rows_continue: bool) -> Callable[[Batch], BatchScore]:
            return CarriedState(model, rows_continue=rows_continue).score

        task = get_recipe(self.run.recipe).card.task.variant(self.run.data.kind)
        config = EvaluateConfig(metric=self.run.evaluate.metric, batches=self.run.evaluate.batches)
        validator = Validator(begin_pass, self.batches, config, SINGLE_PROCESS_GROUP, task=task)
        with torch.no_grad(), eval_mode(model):
            scores = validator()
        assert scores is not None
        return scores


def held_out_scores(trained: TrainedRun) -> HeldOutScores:
    """The validation data of a trained run, from its prepared files where they suffice."""
    batches = trained.load_split("valid").batches
    if batches is None:
        batches = open_run_data(trained.config, trained.folder, no_log).valid
    return HeldOutScores(trained.config, batches)


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


def prune_heads(model: Model, removed: RemovedHeads) -> Model:
    """A copy of `model` without these heads, as `prune_heads(model, {"encoder.0.attention": [1, 3]})`.

    It computes what the model computes with the gates of these heads at 0, can be trained, saved and checked like any
    model, and its spec has the heads in `removed_heads`, numbered as the recipe numbers them. A layer without any head
    left becomes the bias of its output projection. Raises UserError for heads that do not exist or cannot be removed,
    and for a recipe that does not choose a number of heads."""
    check_prunable(model)
    keywords = model.spec.keywords
    pruned = copy.deepcopy(model)
    remove_heads(pruned, removed)
    text = format_heads(add_heads(parse_heads(keywords[REMOVED_HEADS] or ""), removed))
    pruned.spec = model.spec._replace(keywords={**keywords, REMOVED_HEADS: text or None})
    return pruned


def check_prunable(model: Model) -> None:
    """Raise UserError for a model of a recipe without `removed_heads`, which could not be built without some heads."""
    if REMOVED_HEADS not in model.spec.keywords:
        raise UserError(f"{model.spec.recipe} does not choose a number of heads, so none of them can be removed")


def write_pruned_run(out: Path, trained: TrainedRun, weights: Path, removed: RemovedHeads) -> Model:
    """Write the run `trained` with the `weights` of another run, or its own, and without these heads into `out`."""
    model = prune_heads(load(weights), removed)
    settings = trained.config.model_dump(mode="json", by_alias=True)
    settings["model"][REMOVED_HEADS] = model.spec.keywords[REMOVED_HEADS]
    config = RunConfig.model_validate({**settings, "init_from": str(weights), "out": str(out)})
    with report_disk_full(f"the pruned model in {out}"), replacement_folder(out / "model") as folder:
        copy_tokenizers(weights / "model", folder)
        atomic_write_text(folder / RUN_FILE, dump_run(config))
        model.write_files(folder)
    atomic_write_text(out / RUN_FILE, dump_run(config))
    return model
