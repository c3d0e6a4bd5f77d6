"""A comparison as a picture: scores against the setting that was swept, or side by side."""

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from manyformer.compare.comparison_report import ComparisonResult, label
from manyformer.compare.scoring import kind_of
from manyformer.view.figures import colour, panels, style, write_picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NEAR = 0.045
"""Names closer than this share of the axis are moved apart."""

LETTERS = 7
"""Letters of a title in an inch, at most."""


def draw(compared: ComparisonResult, path: Path) -> None:
    """Write the picture; one panel a score."""
    scores = compared.comparison.file.score
    figure, axes = panels(1, len(scores))
    tall = 0 if compared.comparison.setting else max(0, len(compared.cases) - 8)
    figure.set_size_inches(figure.get_figwidth() * 1.35, figure.get_figheight() * 1.25 + 0.28 * tall)
    for axis, score in zip(axes, scores):
        if compared.comparison.setting is None:
            _side_by_side(axis, compared, score)
        else:
            _against(axis, compared, score)
    figure.suptitle(textwrap.fill(compared.comparison.file.title, int(LETTERS * figure.get_figwidth())))
    write_picture(figure, path)


def _against(axis: "Axes", compared: ComparisonResult, score: str) -> None:
    """A line for each case over the values, with its deviation as whiskers and its name at its end."""
    values = compared.comparison.values
    numbers = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
    places = [float(v) for v in numbers] if len(numbers) == len(values) else list(map(float, range(len(values))))
    ends: list[tuple[float, float, str, str]] = []
    for number, case in enumerate(compared.cases):
        points = [(x, compared.mean(case, score, i), compared.deviation(case, score, i)) for i, x in enumerate(places)]
        known = [(x, y, 0.0 if d is None else d) for x, y, d in points if y is not None]
        if known:
            xs, ys, spread = zip(*known)
            axis.errorbar(
                xs, ys, yerr=spread, fmt=style(number), color=colour(number), marker="o", ms=4, lw=1.6, capsize=2.5
            )
            ends.append((xs[-1], ys[-1], case, colour(number)))
    if len(numbers) == len(values) and min(places) > 0 and max(places) / min(places) >= 4:
        axis.set_xscale("log", base=2)
    axis.set_xticks(places, [f"{v:,}" if isinstance(v, int) else str(v) for v in values])
    axis.set_xticks([], minor=True)
    axis.set_xlabel(str(compared.comparison.setting))
    axis.set_ylabel(_better(score))
    _name_ends(axis, ends)


def _name_ends(axis: "Axes", ends: list[tuple[float, float, str, str]]) -> None:
    """Each case's name beside the end of its line, names apart from each other where lines end at the same place."""
    low, high = axis.get_ylim()
    gap = NEAR * (high - low)
    for place in {x for x, _, _, _ in ends}:
        here = sorted((end for end in ends if end[0] == place), key=lambda end: end[1])
        heights = _apart([y for _, y, _, _ in here], gap)
        for (x, _, name, tint), height in zip(here, heights):
            # the offset in points keeps the name off the mark whatever the scale
            axis.annotate(
                name, (x, height), xytext=(7, 0), textcoords="offset points", color=tint, va="center", fontsize="small"
            )
        low, high = min(low, heights[0] - gap), max(high, heights[-1] + gap)
    axis.set_ylim(low, high)


def _apart(heights: list[float], gap: float) -> list[float]:
    """Rising numbers moved as little as it takes for a gap between any two: the mean of moving up and moving down."""
    up, down = list(heights), list(heights)
    for i in range(1, len(heights)):
        up[i] = max(up[i], up[i - 1] + gap)
        down[-i - 1] = min(down[-i - 1], down[-i] - gap)
    return [(a + b) / 2 for a, b in zip(up, down)]


def _side_by_side(axis: "Axes", compared: ComparisonResult, score: str) -> None:
    """A line for each case: single seeds as small dots, their mean as a large one."""
    cases = compared.cases
    for number, case in enumerate(cases):
        values = compared.values(case, score)
        if values:
            axis.plot(values, [number] * len(values), ".", color="#999999", ms=5, zorder=2)
            mean, deviation = compared.mean(case, score), compared.deviation(case, score)
            assert mean is not None
            axis.errorbar([mean], [number], xerr=[deviation or 0.0], fmt="o", color=colour(0), ms=6, capsize=3)
            axis.annotate(
                f"{mean:.{kind_of(score).digits}f}", (mean, number), xytext=(0, 7), textcoords="offset points",
                ha="center", fontsize="x-small",
            )  # fmt: skip
    axis.set_yticks(range(len(cases)), cases)
    axis.set_ylim(len(cases) - 0.4, -0.6)
    axis.set_xlabel(_better(score))


def _better(score: str) -> str:
    return f"{label(score)}, {'less' if kind_of(score).less else 'more'} is better"
