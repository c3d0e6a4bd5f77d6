"""Pruning of a trained run: its heads are removed in steps, scored after each, and what remains is a run.

`RemovableHeads` are the heads that may go, a `HeadRanking` decides the order (the gradients of their gates, or gates
that are trained), `prune_run` carries it out, and `prune_heads` removes given heads from any model."""

import copy
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple, final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from manyformer.analysis.heads.head_importance import HeadValues, head_importance, normalize_layers
from manyformer.base.errors import UserError
from manyformer.base.files.atomic_files import atomic_write_text, report_disk_full
from manyformer.base.files.figures import QUIET_COLOR, curve_style, panels, write_picture
from manyformer.base.files.json_records import AS_OBJECT, Count, FileRecord
from manyformer.base.files.verified_folder import check_unfinished, unfinished_folder
from manyformer.base.type_aliases import LogFn
from manyformer.config import RUN_FILE, EvaluateConfig, RunConfig, dump_run
from manyformer.conversion import load
from manyformer.data.batching.epochs import HeldOutBatches
from manyformer.data.pipeline.kind import no_log
from manyformer.data.rollouts import EpisodeBatch
from manyformer.inference.evaluate.eval_data import TrainedRun, open_run
from manyformer.models import BatchScore, Model
from manyformer.models.model import CarriedState, eval_mode
from manyformer.models.model_files import copy_tokenizers, replacement_folder
from manyformer.nn.attention.attention import MultiHeadLayer
from manyformer.nn.attention.head_gates import (
    RemovedHeads,
    add_heads,
    attention_heads,
    format_heads,
    gated_heads,
    layers_of_part,
    parse_heads,
    read_gates,
    remove_heads,
)
from manyformer.nn.batches import Batch
from manyformer.nn.runtime.exact_shares import round_share
from manyformer.recipes import get_recipe
from manyformer.recipes.parts.registry import REMOVED_HEADS
from manyformer.training import train
from manyformer.training.build_model import open_run_data
from manyformer.training.events import EventListener
from manyformer.training.process_group import SINGLE_PROCESS_GROUP
from manyformer.training.run_folder import RESULT_FILE
from manyformer.training.validation import ResultRecord, Validator

CURVE_FILE = "pruning.json"
CURVE_PICTURE = "pruning.png"

STEP_SHARE = 0.1
"""The share of all heads that one step removes (Michel et al. 2019, section 4.1)."""

IMPORTANCE_BATCHES = 32
"""The validation batches from which importance is computed, unless there are fewer."""

TRAINING_SHARE = 5
"""Gates are trained for the number of the run's steps divided by this, unless steps are given."""

ImportanceFn = Callable[[Model, Sequence[Batch], bool], HeadValues]
"""The importance of each head, from validation batches and whether their rows continue; some heads may be off."""


class HeadUnit(NamedTuple):
    """Heads of a layer that are removed together: one head, or all those that share keys and values."""

    layer: str
    heads: tuple[int, ...]


class RemovableHeads(NamedTuple):
    """The units of the layers to prune, and the layers among them that need at least one head."""

    units: tuple[HeadUnit, ...]
    needed_layers: frozenset[str]

    @property
    def minimum(self) -> int:
        """The least number of heads that can remain."""
        return sum(len(next(unit for unit in self.units if unit.layer == name).heads) for name in self.needed_layers)

    def least_important(
        self, importance: Mapping[str, Float[Tensor, " h"]], removed: Sequence[HeadUnit], *, keep: int, step: int
    ) -> list[HeadUnit]:
        """The units to remove next: at most `step` heads, or one unit, of least importance; `keep` heads remain."""
        chosen: list[HeadUnit] = []
        candidates = [unit for unit in self.units if unit not in removed]
        for layer, numbers in importance.items():
            if not numbers.isfinite().all():
                problem = f"the importance of the heads of {layer} is no finite number"
                raise UserError(f"{problem}: heads cannot be ranked by it; look at the weights and the validation data")
        for unit in sorted(candidates, key=lambda unit: float(importance[unit.layer][list(unit.heads)].mean())):
            # heads already chosen in this step are gone too
            remaining = [other for other in candidates if other not in (*chosen, unit)]
            is_last = unit.layer in self.needed_layers and all(other.layer != unit.layer for other in remaining)
            # at least one unit a step, which may have more heads than the step where heads share keys
            is_within_step = not chosen or count_heads((*chosen, unit)) <= step
            if not is_last and is_within_step and count_heads(remaining) >= keep:
                chosen.append(unit)
        return chosen


def removable_heads(model: nn.Module, part: str | None) -> RemovableHeads:
    """The heads of the layers whose names begin with `part`, such as "encoder"; None means all.

    Raises UserError where the model has no such heads."""
    layers = layers_of_part(model, part)
    units = (
        HeadUnit(name, tuple(range(first, first + layer.head_group)))
        for name, layer in layers.items()
        for first in range(0, layer.heads, layer.head_group)
    )
    return RemovableHeads(tuple(units), frozenset(name for name, layer in layers.items() if _needs_heads(layer)))


def _needs_heads(layer: MultiHeadLayer) -> bool:
    try:
        # asked of the layer itself, as only it knows whether its output can be a bias alone
        layer.without_heads()
    except ValueError:
        return True
    return False


def count_heads(units: Sequence[HeadUnit]) -> int:
    """The number of heads of these units."""
    return sum(len(unit.heads) for unit in units)


def heads_by_layer(units: Sequence[HeadUnit]) -> dict[str, tuple[int, ...]]:
    """The numbers of all heads of these units, by layer."""
    layers = dict.fromkeys(unit.layer for unit in units)
    return {layer: tuple(sorted(h for unit in units if unit.layer == layer for h in unit.heads)) for layer in layers}


def closed_gates(model: nn.Module, units: Sequence[HeadUnit]) -> dict[str, Float[Tensor, " h"]]:
    """Gates for `gated_heads` that switch the heads of these units off."""
    layers = attention_heads(model)
    gates = dict[str, Tensor]()
    for name, heads in heads_by_layer(units).items():
        gates[name] = torch.ones(layers[name].heads)
        gates[name][list(heads)] = 0
    return gates


class RankedWeights(NamedTuple):
    """The folder of the run whose weights are pruned, and the importance of its heads."""

    folder: Path
    importance: ImportanceFn


class HeadRanking(ABC):
    """Decides the order in which heads are removed; `name` is its name on the command line."""

    name: str

    @abstractmethod
    def rank(self, trained: TrainedRun, part: str | None, out: Path) -> RankedWeights:
        """Rank the heads of the layers in `part`; a run that is trained for it is in the folder `name` of `out`."""


@final
@dataclass(frozen=True)
class ImportanceRanking(HeadRanking):
    """By the mean absolute gradient of each head's gate, computed again after each step (Michel et al. 2019, 4.1)."""

    name = "importance"

    def rank(self, trained: TrainedRun, part: str | None, out: Path) -> RankedWeights:
        return RankedWeights(trained.folder, _gradient_importance)


def _gradient_importance(model: Model, batches: Sequence[Batch], rows_continue: bool) -> HeadValues:  # noqa: FBT001
    if any(isinstance(batch, EpisodeBatch) for batch in batches):
        raise UserError("a policy has no loss on held-out data, whose gradient is the importance: choose --how gates")
    return normalize_layers(head_importance(model, batches, rows_continue=rows_continue))


@final
@dataclass(frozen=True)
class GateRanking(HeadRanking):
    """By gates that are trained together with the weights (Voita et al. 2019, section 6); see `gate_training`."""

    penalty: float
    learning_rate: float
    steps: int | None
    on_event: EventListener | None
    name = "gates"

    def rank(self, trained: TrainedRun, part: str | None, out: Path) -> RankedWeights:
        folder = out / self.name
        train(gate_training(trained, self, part, folder), on_event=self.on_event)
        log_alpha = read_gates(folder)
        return RankedWeights(folder, lambda *_: log_alpha)


def gate_training(trained: TrainedRun, ranking: GateRanking, part: str | None, out: Path) -> RunConfig:
    """The run that trains gates: that of the model, from its weights, for fewer steps and at a lower learning rate.

    It makes a fifth of the steps, unless `ranking` has another number. With a `part` such as "encoder", all other
    parts are frozen, as in the paper."""
    steps = ranking.steps
    settings = trained.config.model_dump(mode="json", by_alias=True)
    if steps is None and not (trained.folder / RESULT_FILE).exists():
        raise UserError(f"{trained.folder} has not been trained itself, so the number of steps for gates must be given")
    if steps is None:
        steps = max(1, ResultRecord.read(trained.folder / RESULT_FILE).step // TRAINING_SHARE)
    if part is None:
        frozen = []
    else:
        frozen = _other_parts(trained.load_model("cpu"), part)
    settings.update(
        init_from=str(trained.folder),
        out=str(out),
        frozen=frozen,
        schedule={"name": "cosine", "warmup": steps // 10},
        limits={"steps": steps},
    )
    settings["optim"]["lr"] = ranking.learning_rate
    settings["loss"] |= {"gate_penalty": ranking.penalty, "gated_part": part}
    # gates are trained to the end, whatever the validation says on the way
    settings["evaluate"] |= {"patience": None}
    settings["save"] |= {"keep_best": 0, "average_last": 0}
    return RunConfig.model_validate(settings)


def _other_parts(model: Model, part: str) -> list[str]:
    """The top-level modules with weights that do not belong to `part`, which its embedding does."""
    prefix = part.partition(".")[0]
    return [
        name
        for name, child in model.named_children()
        if not name.startswith(prefix) and next(child.parameters(), None) is not None
    ]


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
        axis.plot(heads, values, lw=1.4, **curve_style(0))
        axis.axhline(values[0], color=QUIET_COLOR, lw=0.8, ls="--")
        where = "" if self.part is None else f" in {self.part}"
        axis.set(xlabel=f"heads of {self.total}{where}, removed by {self.how}", ylabel=f"{self.metric} (validation)")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.invert_xaxis()
        write_picture(figure, path)


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
        # gates were trained together with the weights, which no longer are those of the run
        if weights != trained.folder:
            model = open_run(weights).load_model(device)
        steps = _PruningSteps(model, removable, importance, held_out_scores(trained), keep)
        removed = list[HeadUnit]()
        points = [steps.score(())]
        on_point(points[0])
        # ranked again after every step: heads become important when others are gone
        while units := steps.next_units(removed):
            removed += units
            points.append(steps.score(removed))
            on_point(points[-1])
        curve = QualityCurve(
            how=ranking.name, part=part, metric=trained.config.evaluate.metric, total=total, points=points
        )
        removed_heads = heads_by_layer(removed)
        pruned = write_pruned_run(folder, trained, weights, removed_heads)
        # after the run, whose folder is unfinished until everything is in it
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
    # a model that was pruned before: its heads are numbered as those of the whole layer
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
        # the model goes into a draft folder, which takes the place of an earlier one as a whole
        model.write_files(folder)
    atomic_write_text(out / RUN_FILE, dump_run(config))
    return model
