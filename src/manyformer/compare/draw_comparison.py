"""The files of a comparison; its figure has scores over the swept setting, or one row per case."""

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from manyformer.compare.comparison_report import ComparisonResult, score_label
from manyformer.compare.scoring import score_kind
from manyformer.files.atomic_files import atomic_write_text, make_folder
from manyformer.view.figures import PANEL_INCHES, curve_color, curve_style, panels, write_picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MIN_LABEL_GAP = 0.045
"""The minimum distance of two labels, as a share of the axis."""

TITLE_CHARACTERS_PER_INCH = 7
"""The maximum number of title characters per inch of width."""


def write_comparison(result: ComparisonResult, folder: Path) -> list[Path]:
    """Write table.md, table.csv, results.json and picture.png, and return their paths."""
    make_folder(folder)
    texts = {"table.md": result.to_markdown(), "table.csv": result.to_csv(), "results.json": result.to_json()}
    for name, text in texts.items():
        atomic_write_text(folder / name, text)
    draw_comparison(result, folder / "picture.png")
    return [folder / name for name in (*texts, "picture.png")]


def draw_comparison(result: ComparisonResult, path: Path) -> None:
    """Write the figure to `path`, with one panel per score."""
    scores = result.comparison.file.score
    extra_rows = 0 if result.comparison.setting else max(0, len(result.cases) - 8)
    figure, axes = panels(1, len(scores), (PANEL_INCHES[0] * 1.35, PANEL_INCHES[1] * 1.25 + 0.28 * extra_rows))
    plot = _plot_cases if result.comparison.setting is None else _plot_sweep
    for axis, score in zip(axes, scores):
        plot(axis, result, score)
    figure.suptitle(textwrap.fill(result.comparison.file.title, int(TITLE_CHARACTERS_PER_INCH * figure.get_figwidth())))
    write_picture(figure, path)


def _plot_sweep(axis: "Axes", result: ComparisonResult, score: str) -> None:
    """Plot a curve per case over the swept values, with standard deviations as error bars and a label at its end."""
    values = result.comparison.values
    numbers = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
    positions = [float(v) for v in numbers] if len(numbers) == len(values) else list(map(float, range(len(values))))
    ends: list[tuple[float, float, str, str]] = []
    for case_index, case in enumerate(result.cases):
        points = [(x, result.mean(case, score, i), result.deviation(case, score, i)) for i, x in enumerate(positions)]
        measured = [(x, y, 0.0 if d is None else d) for x, y, d in points if y is not None]
        if measured:
            xs, ys, deviations = zip(*measured)
            style = curve_style(case_index)
            axis.errorbar(xs, ys, yerr=deviations, marker="o", ms=4, lw=1.6, capsize=2.5, **style)
            ends.append((xs[-1], ys[-1], case, curve_color(case_index)))
    if len(numbers) == len(values) and min(positions) > 0 and max(positions) / min(positions) >= 4:
        axis.set_xscale("log", base=2)
    axis.set_xticks(positions, [f"{v:,}" if isinstance(v, int) else str(v) for v in values])
    axis.set_xticks([], minor=True)
    axis.set(xlabel=str(result.comparison.setting), ylabel=_axis_label(score))
    _label_curve_ends(axis, ends)


def _label_curve_ends(axis: "Axes", ends: list[tuple[float, float, str, str]]) -> None:
    """Write each case's name next to the end of its curve, with a minimum gap between names at the same x."""
    low, high = axis.get_ylim()
    gap = MIN_LABEL_GAP * (high - low)
    for position in {x for x, _, _, _ in ends}:
        labels = sorted((end for end in ends if end[0] == position), key=lambda end: end[1])
        heights = _spread_labels([y for _, y, _, _ in labels], gap)
        for (x, _, name, color), height in zip(labels, heights):
            # an offset in points keeps the name off the marker at any scale
            axis.annotate(name, (x, height), (7, 0), textcoords="offset points", color=color, va="center", size="small")
        low, high = min(low, heights[0] - gap), max(high, heights[-1] + gap)
    axis.set_ylim(low, high)


def _spread_labels(heights: list[float], gap: float) -> list[float]:
    """Sorted label heights with a gap of at least `gap`: the mean of pushing labels up and pushing them down."""
    raised, lowered = list(heights), list(heights)
    for i in range(1, len(heights)):
        raised[i] = max(raised[i], raised[i - 1] + gap)
        lowered[-i - 1] = min(lowered[-i - 1], lowered[-i] - gap)
    return [(a + b) / 2 for a, b in zip(raised, lowered)]


def _plot_cases(axis: "Axes", result: ComparisonResult, score: str) -> None:
    """Plot a row per case: single seeds as small dots, their mean as a large one."""
    cases = result.cases
    for case_index, case in enumerate(cases):
        values = result.values(case, score)
        if values:
            axis.plot(values, [case_index] * len(values), ".", color="#999999", ms=5, zorder=2)
            mean, deviation = result.mean(case, score), result.deviation(case, score)
            assert mean is not None
            axis.errorbar([mean], [case_index], xerr=[deviation or 0.0], fmt="o", color=curve_color(0), ms=6, capsize=3)
            label, place = f"{mean:.{score_kind(score).digits}f}", (mean, case_index)
            axis.annotate(label, place, (0, 7), textcoords="offset points", ha="center", fontsize="x-small")
    axis.set_yticks(range(len(cases)), cases)
    axis.set_ylim(len(cases) - 0.4, -0.6)
    axis.set_xlabel(_axis_label(score))


def _axis_label(score: str) -> str:
    return f"{score_label(score)}, {'less' if score_kind(score).lower_is_better else 'more'} is better"
