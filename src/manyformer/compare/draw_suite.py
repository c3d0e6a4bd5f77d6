"""The files of a suite's result; its figures have one panel for each task and one mark for each case."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from manyformer.compare.comparison_report import score_label
from manyformer.compare.suite_report import EQUAL_STEPS, SuiteResult, TaskResult
from manyformer.files.atomic_files import atomic_write_text, make_folder
from manyformer.view.figures import PANEL_INCHES, curve_color, curve_style, panels, write_picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MARKERS = "os^DvP*X"
MAX_COLUMNS = 3
LEGEND_INCHES = (2.1, 0.22)
"""The width of a column of a legend, and the height of a row."""


class ScatterFigure(NamedTuple):
    """A figure of the scores against a cost of each case: its file, the label of the axis, and the cost."""

    name: str
    label: str
    cost: Callable[[SuiteResult, TaskResult, str], float | None]


def write_suite(result: SuiteResult, folder: Path) -> SuiteResult:
    """Write table.md, results.json and the figures, and return the result with their paths."""
    make_folder(folder)
    files = []
    for figure in SCATTER_FIGURES:
        if draw_scatter(result, figure, folder / figure.name):
            files.append(folder / figure.name)
    if draw_lengths(result, folder / "length.png"):
        files.append(folder / "length.png")
    result = replace(result, files=(folder / "table.md", folder / "results.json", *files))
    atomic_write_text(folder / "table.md", result.to_markdown())
    atomic_write_text(folder / "results.json", result.to_json())
    return result


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
    states = [] if costs is None else [cost.state_bytes for cost in costs.lengths if cost.state_bytes]
    return states[-1] if states else None


def _step_seconds(result: SuiteResult, task: TaskResult, case: str) -> float | None:
    """The mean seconds of a training."""
    measured = [m.minutes for m in task.results[EQUAL_STEPS].measurements_of(case) if m.minutes]
    return 60 * math.fsum(measured) / len(measured) if measured else None


SCATTER_FIGURES = (
    ScatterFigure("state.png", "bytes of the decoding state", _state_bytes),
    ScatterFigure("seconds.png", "seconds of a training", _step_seconds),
)
