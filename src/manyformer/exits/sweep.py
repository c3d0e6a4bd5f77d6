"""Thresholds swept: what a model still writes well, in how many layers, and how fast."""

import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from manyformer.errors import UserError
from manyformer.exits.early_decoding import DecodedTexts, ThresholdValues, stack_of
from manyformer.exits.prompts_from_run import PromptSet
from manyformer.exits.text_distance import rouge_l

VALUES = (0.99, 0.95, 0.9, 0.8, 0.7, 0.5, 0.3)


@dataclass(frozen=True)
class ThresholdPoint:
    """What came of one threshold: `bleu` where there are references, `consistency` with the full model from 0 to 1.

    `threshold` None is the full model, and "foretold" a rule that knows no threshold.
    """

    model: str
    threshold: ThresholdValues | str | None
    bleu: float | None
    consistency: float
    layers: float
    tokens_per_second: float

    @property
    def label(self) -> str:
        """The threshold in words."""
        if self.threshold is None:
            return "none leaves"
        if isinstance(self.threshold, str | float | int):
            return str(self.threshold)
        return " ".join(f"{value:.2f}" for value in self.threshold)


def sweep(
    name: str,
    material: PromptSet,
    values: Sequence[ThresholdValues] = VALUES,
    *,
    tokenize: str | None = None,
    rounds: int = 1,
    each: Callable[[ThresholdPoint], None] = lambda point: None,
) -> list[ThresholdPoint]:
    """Let the model write under each threshold; the full model comes first.

    A rule without a threshold is tried as it is. Times are the medians of `rounds` that take turns, in each of which
    every threshold is written with once. Raises UserError for a threshold below 0.
    """
    _check(values)
    task = material.task
    known: list[ThresholdValues | str | None] = [None, *(values if takes_thresholds(material) else ["foretold"])]
    written: dict[int, list[DecodedTexts]] = {number: [] for number in range(len(known))}
    for _ in range(rounds):
        for number, value in enumerate(known):
            written[number].append(task.decode_with_own_rule() if isinstance(value, str) else task.write(value))
    full = written[0][0].texts
    points = []
    for number, value in enumerate(known):
        first = written[number][0]
        speed = statistics.median(one.tokens_per_second for one in written[number])
        alike = 1 - statistics.fmean(map(rouge_l, first.texts, full))
        points.append(
            ThresholdPoint(name, value, _bleu(first.texts, material.references, tokenize), alike, first.layers, speed)
        )
        each(points[-1])
    return points


def _check(values: Sequence[ThresholdValues]) -> None:
    for value in values:
        for one in (value,) if isinstance(value, float | int) else value:
            if not one >= 0:
                raise UserError(f"a threshold ({one:g}) must be at least 0: with 0 all leave at once, above 1 none do")


def takes_thresholds(material: PromptSet) -> bool:
    """Whether the model's rule has a threshold."""
    return hasattr(stack_of(material.task.model).rule, "values")


def drawn(depth: int, count: int, seed: int) -> list[tuple[float, ...]]:
    """Random thresholds, one for each layer but the last, evenly from 0 to 1 (Elbayad et al. 2020, section 4.3)."""
    numbers = torch.rand(count, depth - 1, generator=torch.Generator().manual_seed(seed))
    return [tuple(row) for row in numbers.tolist()]


def best_in_bins(points: Sequence[ThresholdPoint], width: float = 0.5) -> list[ThresholdPoint]:
    """Of the points whose mean layers fall into the same stretch of `width`, the best one, as the paper keeps them."""
    best: dict[int, ThresholdPoint] = {}
    for point in points:
        place = int(point.layers / width)
        if place not in best or _worth(point) > _worth(best[place]):
            best[place] = point
    return [best[place] for place in sorted(best)]


def write_points(points: Sequence[ThresholdPoint], folder: Path) -> list[Path]:
    """The table as Markdown and as JSON, and the picture, into `folder`."""
    from manyformer.exits.draw_points import draw_points

    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / name for name in ("early-exit.md", "early-exit.json", "early-exit.png")]
    rows = ["| " + " | ".join(row) + " |" for row in (HEADS, ["---"] * len(HEADS), *table(points))]
    files[0].write_text("\n".join(rows) + "\n", encoding="utf-8")
    files[1].write_text(json.dumps([asdict(point) for point in points], indent=1) + "\n", encoding="utf-8")
    draw_points(points, files[2])
    return files


HEADS = ("model", "threshold", "BLEU", "consistency", "layers", "tokens/s", "times as fast")


def table(points: Sequence[ThresholdPoint]) -> list[tuple[str, ...]]:
    """A row a point; speeds also as multiples of the same model's without early exits."""
    return [
        (
            point.model,
            point.label,
            "" if point.bleu is None else f"{point.bleu:.1f}",
            f"{point.consistency:.3f}",
            f"{point.layers:.2f}",
            f"{point.tokens_per_second:.0f}",
            f"{pace:.2f}" if pace else "",
        )
        for point, pace in zip(points, paces(points))
    ]


def paces(points: Sequence[ThresholdPoint]) -> list[float]:
    """Speeds as multiples of the same model's without early exits; 0 where that is not among the points."""
    full = {point.model: point.tokens_per_second for point in points if point.threshold is None}
    return [point.tokens_per_second / full.get(point.model, math.inf) for point in points]


def _bleu(texts: Sequence[str], references: Sequence[str] | None, tokenize: str | None) -> float | None:
    if references is None:
        return None
    from manyformer.scores import bleu

    return bleu(texts, references, tokenize=tokenize).value


def _worth(point: ThresholdPoint) -> float:
    return point.consistency if point.bleu is None else point.bleu
