"""The files of a comparison or a suite: tables, results and pictures."""

import math
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from manyformer.compare.comparison_report import ComparisonResult, score_label
from manyformer.compare.scoring import score_kind
from manyformer.compare.suite_report import EQUAL_STEPS, SuiteResult, TaskResult
from manyformer.files.atomic_files import atomic_write_text, make_folder
from manyformer.view.figures import PANEL_INCHES, curve_color, curve_style, panels, write_picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MIN_LABEL_GAP = 0.045
"""The minimum distance of two labels, as a share of the axis."""

TITLE_CHARACTERS_PER_INCH = 7
"""The maximum number of title characters per inch of width."""

MARKERS = "os^DvP*X"
MAX_COLUMNS = 3
LEGEND_INCHES = (2.1, 0.22)
"""The width of a column of a legend, and the height of a row."""


class ScatterFigure(NamedTuple):
    """A figure of the scores against a cost of each case: its file, the label of the axis, and the cost."""

    name: str
    label: str
    cost: Callable[[SuiteResult, TaskResult, str], float | None]


def write_comparison(result: ComparisonResult, folder: Path) -> ComparisonResult:
    """Write table.md, table.csv, results.json and picture.png, and return the result with their paths."""
    texts = {"table.md": result.to_markdown(), "table.csv": result.to_csv(), "results.json": result.to_json()}
    files = _write_texts(folder, texts)
    draw_comparison(result, folder / "picture.png")
    return replace(result, files=(*files, folder / "picture.png"))


def write_suite(result: SuiteResult, folder: Path) -> SuiteResult:
    """Write table.md, results.json and the figures, and return the result with their paths."""
    make_folder(folder)
    figures = {figure.name: draw_scatter(result, figure, folder / figure.name) for figure in SCATTER_FIGURES}
    figures["length.png"] = draw_lengths(result, folder / "length.png")
    drawn = [folder / name for name, is_drawn in figures.items() if is_drawn]
    # the table shows the pictures
    result = replace(result, files=(folder / "table.md", folder / "results.json", *drawn))
    _write_texts(folder, {"table.md": result.to_markdown(), "results.json": result.to_json()})
    return result


def _write_texts(folder: Path, texts: Mapping[str, str]) -> list[Path]:
    make_folder(folder)
    for name, text in texts.items():
        atomic_write_text(folder / name, text)
    return [folder / name for name in texts]


def draw_comparison(result: ComparisonResult, path: Path) -> None:
    """Write the figure to `path`, with one panel per score."""
    scores = result.comparison.file.score
    if result.comparison.setting:
        extra_rows = 0
    else:
        extra_rows = max(0, len(result.cases) - 8)
    figure, axes = panels(1, len(scores), (PANEL_INCHES[0] * 1.35, PANEL_INCHES[1] * 1.25 + 0.28 * extra_rows))
    if result.comparison.setting is None:
        plot = _plot_cases
    else:
        plot = _plot_sweep
    for axis, score in zip(axes, scores):
        plot(axis, result, score)
    figure.suptitle(textwrap.fill(result.comparison.file.title, int(TITLE_CHARACTERS_PER_INCH * figure.get_figwidth())))
    write_picture(figure, path)


def _plot_sweep(axis: "Axes", result: ComparisonResult, score: str) -> None:
    """Plot a curve per case over the swept values, with standard deviations as error bars and a label at its end."""
    values = result.comparison.values
    numbers = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
    if len(numbers) == len(values):
        positions = [float(v) for v in numbers]
    else:
        positions = list(map(float, range(len(values))))
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
        low = min(low, heights[0] - gap)
        high = max(high, heights[-1] + gap)
    axis.set_ylim(low, high)


def _spread_labels(heights: list[float], gap: float) -> list[float]:
    """Sorted label heights with a gap of at least `gap`: the mean of pushing labels up and pushing them down."""
    raised = list(heights)
    lowered = list(heights)
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
            mean = result.mean(case, score)
            deviation = result.deviation(case, score)
            assert mean is not None
            axis.errorbar([mean], [case_index], xerr=[deviation or 0.0], fmt="o", color=curve_color(0), ms=6, capsize=3)
            label = f"{mean:.{score_kind(score).digits}f}"
            place = (mean, case_index)
            axis.annotate(label, place, (0, 7), textcoords="offset points", ha="center", fontsize="x-small")
    axis.set_yticks(range(len(cases)), cases)
    axis.set_ylim(len(cases) - 0.4, -0.6)
    axis.set_xlabel(_axis_label(score))


def _axis_label(score: str) -> str:
    return f"{score_label(score)}, {'less' if score_kind(score).lower_is_better else 'more'} is better"


def draw_scatter(result: SuiteResult, figure: ScatterFigure, path: Path) -> bool:
    """Write a figure of the main scores against a cost, a panel for each task; False if there is nothing to draw."""
    points = {
        (task.task.name, case): (cost, task.results[EQUAL_STEPS].values(case, task.score))
        for task in result.tasks
        for case in result.cases
        if (cost := figure.cost(result, task, case)) is not None and task.results[EQUAL_STEPS].values(case, task.score)
    }
    if not points:
        return False

    def plot(axis: "Axes", task: TaskResult) -> None:
        for index, case in enumerate(result.cases):
            if (task.task.name, case) in points:
                cost, values = points[task.task.name, case]
                mean = math.fsum(values) / len(values)
                errors = [[mean - min(values)], [max(values) - mean]]
                axis.errorbar([cost], [mean], yerr=errors, label=case, ls="", capsize=2, **_marker(index))
        axis.set_xscale("log")
        axis.set_xlabel(figure.label)

    _draw_panels(result, list(result.tasks), plot, path)
    return True


def draw_lengths(result: SuiteResult, path: Path) -> bool:
    """Write a figure of the main scores over the swept setting, for the tasks that have one; False if none has."""
    tasks = [task for task in result.tasks if task.task.file.setting is not None]

    def plot(axis: "Axes", task: TaskResult) -> None:
        comparison = task.results[EQUAL_STEPS]
        values = comparison.comparison.values
        for index, case in enumerate(result.cases):
            means = [
                (i, mean) for i in range(len(values)) if (mean := comparison.mean(case, task.score, i)) is not None
            ]
            if means:
                style = curve_style(index) | {"marker": MARKERS[index % len(MARKERS)]}
                axis.plot(*zip(*means), label=case, ms=4, lw=1.2, **style)
        axis.set_xticks(
            range(len(values)), [f"{value:,}" if isinstance(value, int) else str(value) for value in values]
        )
        axis.set_xlabel(str(task.task.file.setting))

    if tasks and any(result.tasks[0].results[EQUAL_STEPS].measurements):
        _draw_panels(result, tasks, plot, path)
        return True
    return False


def _draw_panels(
    result: SuiteResult, tasks: list[TaskResult], plot: Callable[["Axes", TaskResult], None], path: Path
) -> None:
    columns = min(MAX_COLUMNS, len(tasks))
    rows = math.ceil(len(tasks) / columns)
    figure, axes = panels(rows, columns, (PANEL_INCHES[0] * 0.8, PANEL_INCHES[1] * 0.95))
    labelled: dict[str, Any] = {}
    for axis, task in zip(axes, tasks):
        plot(axis, task)
        handles, labels = axis.get_legend_handles_labels()
        labelled |= dict(zip(map(str, labels), handles))
        for name, floor in task.task.file.floors.items():
            axis.axhline(floor, color="#888888", lw=0.8, ls=":")
            axis.annotate(
                name,
                (0.01, floor),
                xycoords=("axes fraction", "data"),
                color="#666666",
                fontsize="x-small",
                va="bottom",
            )
        axis.set_title(task.task.name, fontsize="medium")
        axis.set_ylabel(score_label(task.score), fontsize="small")
    for axis in axes[len(tasks) :]:
        axis.set_visible(False)
    order = [case for case in result.cases if case in labelled]
    width, height = figure.get_size_inches()
    legend_columns = math.ceil(len(order) / max(int(height / LEGEND_INCHES[1]), 1))
    figure.set_size_inches(width + LEGEND_INCHES[0] * legend_columns, height)
    figure.legend(
        [labelled[case] for case in order],
        order,
        loc="outside right upper",
        ncols=legend_columns,
        frameon=False,
        fontsize="small",
    )
    write_picture(figure, path)


def _marker(index: int) -> dict[str, Any]:
    return {"color": curve_color(index), "marker": MARKERS[index % len(MARKERS)], "ms": 6}


def _state_bytes(result: SuiteResult, task: TaskResult, case: str) -> float | None:
    """The bytes of the state at the greatest length of the costs."""
    costs = result.costs.get(case)
    if costs is None:
        states = []
    else:
        states = [cost.state_bytes for cost in costs.lengths if cost.state_bytes]
    if states:
        return states[-1]
    return None


def _step_seconds(result: SuiteResult, task: TaskResult, case: str) -> float | None:
    """The mean seconds of a training."""
    measured = [m.minutes for m in task.results[EQUAL_STEPS].measurements_of(case) if m.minutes]
    if measured:
        return 60 * math.fsum(measured) / len(measured)
    return None


SCATTER_FIGURES = (
    ScatterFigure("state.png", "bytes of the decoding state", _state_bytes),
    ScatterFigure("seconds.png", "seconds of a training", _step_seconds),
)
