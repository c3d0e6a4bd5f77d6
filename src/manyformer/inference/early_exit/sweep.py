"""Sweeps of exit thresholds: text quality, layers per token and decoding speed under each, as a table and a plot."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from manyformer.base.errors import UserError
from manyformer.base.files.atomic_files import atomic_write_text, make_folder
from manyformer.base.files.figures import add_legend, curve_color, curve_style, panels, write_picture
from manyformer.base.files.json_text import json_text
from manyformer.base.files.text_tables import markdown_table
from manyformer.inference.early_exit.early_decoding import ThresholdValues, early_exit_stack, rouge_l_distance
from manyformer.inference.early_exit.prompts_from_run import PromptSet
from manyformer.models.scores import rank_key

DEFAULT_THRESHOLDS = (0.99, 0.95, 0.9, 0.8, 0.7, 0.5, 0.3)


@dataclass(frozen=True)
class ThresholdPoint:
    """Results of one threshold: `bleu` where there are references, `consistency` with the full model from 0 to 1.

    `threshold` None is the full model, and "predicted" an exit rule without a threshold, which predicts the exit layer.
    """

    model: str
    threshold: ThresholdValues | str | None
    bleu: float | None
    consistency: float
    layers: float
    tokens_per_second: float

    @property
    def label(self) -> str:
        """The threshold as text for tables and plots."""
        if self.threshold is None:
            return "no exits"
        if isinstance(self.threshold, str | float | int):
            return str(self.threshold)
        return " ".join(f"{value:.2f}" for value in self.threshold)


def sweep(
    name: str,
    prompt_set: PromptSet,
    thresholds: Sequence[ThresholdValues] = DEFAULT_THRESHOLDS,
    *,
    tokenize: str | None = None,
    rounds: int = 1,
    on_point: Callable[[ThresholdPoint], None] = lambda point: None,
) -> list[ThresholdPoint]:
    """Decode the prompts under each threshold; the full model comes first.

    An exit rule without a threshold is used unchanged. Speeds are medians over `rounds` interleaved rounds, each of
    which decodes once with every threshold. `on_point` receives each result. Raises UserError for a threshold below 0.
    """
    _check_thresholds(thresholds)
    workload = prompt_set.workload
    # the full model first: consistency is measured against its texts
    settings: list[ThresholdValues | str | None] = [None, *(thresholds if has_threshold(prompt_set) else ["predicted"])]
    # whole rounds one after the other, so that other load on the machine slows all thresholds alike
    decoded = [
        [workload.decode_with_own_rule() if isinstance(value, str) else workload.decode(value) for value in settings]
        for _ in range(rounds)
    ]
    points = []
    for index, threshold in enumerate(settings):
        # texts do not differ from round to round, only speeds do
        texts, _, _, layers = decoded[0][index]
        tokens_per_second = statistics.median(results[index].tokens_per_second for results in decoded)
        consistency = 1 - statistics.fmean(map(rouge_l_distance, texts, decoded[0][0].texts))
        bleu = _bleu(texts, prompt_set.references, tokenize)
        points.append(ThresholdPoint(name, threshold, bleu, consistency, layers, tokens_per_second))
        on_point(points[-1])
    return points


def _check_thresholds(thresholds: Sequence[ThresholdValues]) -> None:
    for layer_thresholds in thresholds:
        for threshold in (layer_thresholds,) if isinstance(layer_thresholds, float | int) else layer_thresholds:
            if not threshold >= 0:
                raise UserError(
                    f"a threshold ({threshold:g}) must be at least 0: at 0 every token exits after the first layer, "
                    "above 1 none exits early"
                )


def has_threshold(prompt_set: PromptSet) -> bool:
    """Whether the model's exit rule has a threshold."""
    return hasattr(early_exit_stack(prompt_set.workload.model).rule, "values")


def random_thresholds(depth: int, count: int, seed: int) -> list[tuple[float, ...]]:
    """`count` tuples of uniform thresholds in [0, 1), one for each layer but the last (Elbayad et al. 2020, 4.3)."""
    values = torch.rand(count, depth - 1, generator=torch.Generator().manual_seed(seed))
    return [tuple(row) for row in values.tolist()]


def best_in_bins(points: Sequence[ThresholdPoint], width: float = 0.5) -> list[ThresholdPoint]:
    """The best point of each bin of `width` mean layers per token, as Elbayad et al. (2020) select them."""
    best: dict[int, ThresholdPoint] = {}
    for point in points:
        bin_index = int(point.layers / width)
        quality = rank_key(_quality(point), lower_is_better=False)
        # rank_key puts NaN last, which a comparison of numbers would not
        if bin_index not in best or quality < rank_key(_quality(best[bin_index]), lower_is_better=False):
            best[bin_index] = point
    return [best[bin_index] for bin_index in sorted(best)]


def speedups(points: Sequence[ThresholdPoint]) -> list[float]:
    """Speeds relative to the same model without early exits; 0 where that is not among the points."""
    full = {point.model: point.tokens_per_second for point in points if point.threshold is None}
    return [point.tokens_per_second / full.get(point.model, math.inf) for point in points]


TABLE_HEADER = ("model", "threshold", "BLEU", "consistency", "layers", "tokens/s", "times as fast")


def table_rows(points: Sequence[ThresholdPoint]) -> list[tuple[str, ...]]:
    """One table row per point; the last column is the speed relative to the same model without early exits."""
    return [
        (
            point.model,
            point.label,
            "" if point.bleu is None else f"{point.bleu:.1f}",
            f"{point.consistency:.3f}",
            f"{point.layers:.2f}",
            f"{point.tokens_per_second:.0f}",
            f"{speedup:.2f}" if speedup else "",
        )
        for point, speedup in zip(points, speedups(points))
    ]


def write_points(points: Sequence[ThresholdPoint], folder: Path) -> list[Path]:
    """Write the points to `folder` as a Markdown table, as JSON and as a plot, and return the paths."""
    make_folder(folder)
    files = [folder / name for name in ("early-exit.md", "early-exit.json", "early-exit.png")]
    atomic_write_text(files[0], "\n".join(markdown_table(TABLE_HEADER, table_rows(points))) + "\n")
    atomic_write_text(files[1], json_text([asdict(point) for point in points], indent=1, ensure_ascii=True) + "\n")
    draw_points(points, files[2])
    return files


def draw_points(points: Sequence[ThresholdPoint], path: Path) -> None:
    """Write the plot to `path`; a ring marks the full model of each line."""
    figure, axes = panels(1, 2)
    # one axis for all lines: BLEU only where every model has it
    scored = all(point.bleu is not None for point in points)
    for index, name in enumerate(dict.fromkeys(point.model for point in points)):
        model_points = [point for point in points if point.model == name]
        values = [point.bleu if scored and point.bleu is not None else point.consistency for point in model_points]
        for axis, x_values in zip(axes, ([p.layers for p in model_points], speedups(model_points))):
            # along the axis, not in the order of thresholds, so that a line does not turn back
            xs, ys = zip(*sorted(zip(x_values, values)))
            axis.plot(xs, ys, lw=1.4, label=name, **curve_style(index))
            for x, value, point in zip(x_values, values, model_points):
                if point.threshold is None:
                    axis.plot([x], [value], "o", ms=10, mfc="none", color=curve_color(index))
    for axis, label in zip(axes, ("mean layers per token", "speed relative to the full model")):
        axis.set(xlabel=label, ylabel="BLEU" if scored else "consistency with the full model (ROUGE-L)")
    add_legend(figure)
    write_picture(figure, path)


def _bleu(texts: Sequence[str], references: Sequence[str] | None, tokenize: str | None) -> float | None:
    if references is None:
        return None
    from manyformer.models.scores import bleu

    return bleu(texts, references, tokenize=tokenize).value


def _quality(point: ThresholdPoint) -> float:
    if point.bleu is None:
        return point.consistency
    return point.bleu
