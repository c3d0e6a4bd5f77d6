"""The figures of a suite: a row of small panels for each family of models, before a gray background of all others."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

from manyformer.analysis.comparisons.comparison_report import score_label, write_texts
from manyformer.analysis.comparisons.suite_report import SuiteResult
from manyformer.analysis.comparisons.suite_results import EQUAL_STEPS, SuiteRecord, TaskRecord
from manyformer.base.files.atomic_files import make_folder
from manyformer.base.files.figures import BACKGROUND_COLOR, QUIET_COLOR, curve_style, panels, write_picture
from manyformer.recipes import RECIPES
from manyformer.recipes.parts.cards import FAMILIES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SMALL_PANEL_INCHES = (1.75, 1.35)
FEW_CASES = 6
"""So many cases can be told apart in one panel, without rows by family."""

ALL_CASES = "all cases"


class CasePoints(NamedTuple):
    """What a panel draws of a case: its places on the x axis, the means of its seeds, and the lowest and highest."""

    x: list[float]
    means: list[float]
    lowest: list[float]
    highest: list[float]


class SuiteFigure(NamedTuple):
    """A figure of the scores of all tasks: its file, the label of its x axis, and what it draws of a case, if anything.

    The x axis of costs is logarithmic."""

    name: str
    label: str
    points: Callable[[SuiteRecord, TaskRecord, str], CasePoints | None]
    costs: bool


def write_suite(result: SuiteResult, folder: Path) -> SuiteResult:
    """Write table.md, results.json and the figures, and return the result with their paths."""
    make_folder(folder)
    results = result.to_json()
    # before the table, which links only the figures that were drawn
    drawn = draw_suite(SuiteRecord.model_validate_json(results), folder)
    result = replace(result, files=(folder / "table.md", folder / "results.json", *drawn))
    write_texts(folder, {"table.md": result.to_markdown(), "results.json": results})
    return result


def draw_suite(suite: SuiteRecord, folder: Path) -> list[Path]:
    """Write the figures of a suite into a folder, without those for which nothing was measured."""
    return [folder / figure.name for figure in SUITE_FIGURES if draw_figure(suite, figure, folder / figure.name)]


SHORT_SCALE = 50.0
"""A scale up to this ratio would have one or two powers of ten alone."""


def draw_figure(suite: SuiteRecord, figure: SuiteFigure, path: Path) -> bool:
    """Write a figure: a row for each family, a column for each task; False if there is nothing to draw."""
    points = {
        task.task: {case: place for case in _cases(suite) if (place := figure.points(suite, task, case)) is not None}
        for task in suite.tasks
    }
    tasks = [task for task in suite.tasks if points[task.task]]
    if not tasks:
        return False
    rows = _rows(suite, {case for places in points.values() for case in places})
    drawing, axes = panels(len(rows), len(tasks), SMALL_PANEL_INCHES)
    for row, (family, cases) in enumerate(rows.items()):
        row_axes = axes[row * len(tasks) : (row + 1) * len(tasks)]
        for axis, task in zip(row_axes, tasks, strict=True):
            _draw_panel(axis, points[task.task], cases)
            if figure.costs:
                axis.set_xscale("log")
            else:
                _label_lengths(axis, task)
        _name_cases(row_axes[-1], cases)
        row_axes[0].set_ylabel(family, fontsize="small", fontweight="bold")
    for axis, task in zip(axes, tasks):
        axis.set_title(f"{task.task}\n{score_label(task.score)}", fontsize="small")
    for column, task in enumerate(tasks):
        _share_scales(axes[column :: len(tasks)])
        if figure.costs:
            _label_costs(axes[column :: len(tasks)])
        _draw_floors(axes[column :: len(tasks)], task)
    for axis in axes[-len(tasks) :]:
        axis.set_xlabel(figure.label, fontsize="small")
    for axis in axes:
        axis.tick_params(labelsize=7)
    # the names of cases stand right of the last column
    width, height = drawing.get_size_inches()
    drawing.set_size_inches(width + 1.8, height + 0.5)
    write_picture(drawing, path)
    return True


def _cases(suite: SuiteRecord) -> list[str]:
    """The names of all cases, in the order of the suite."""
    return list(dict.fromkeys(m.case for task in suite.tasks for m in task.results[EQUAL_STEPS].measured))


def _rows(suite: SuiteRecord, drawn: set[str]) -> dict[str, list[str]]:
    """The drawn cases of each row: those of a family, or all if they are few."""
    cases = [case for case in _cases(suite) if case in drawn]
    if len(cases) <= FEW_CASES:
        return {ALL_CASES: cases}
    families = {case: _family(suite, case) for case in cases}
    return {
        family: [case for case in cases if families[case] == family]
        for family in FAMILIES
        if family in families.values()
    }


def _family(suite: SuiteRecord, case: str) -> str:
    recipe = suite.costs[case].recipe if case in suite.costs else case
    if recipe in RECIPES:
        return RECIPES[recipe].card.family
    # a case whose costs were not measured, or the recipe of a plug-in that is not installed
    return "other"


def _draw_panel(axis: "Axes", points: Mapping[str, CasePoints], cases: list[str]) -> None:
    """All cases in gray, and before them those of the row."""
    for case, place in points.items():
        if case not in cases:
            axis.plot(place.x, place.means, color=BACKGROUND_COLOR, lw=0.8, marker=".", ms=3.5, zorder=1)
    for index, case in enumerate(cases):
        if case in points:
            x, means, lowest, highest = points[case]
            below = [mean - low for mean, low in zip(means, lowest)]
            above = [high - mean for mean, high in zip(means, highest)]
            # bars to the lowest and highest seed, as in the table
            axis.errorbar(
                x, means, yerr=[below, above], lw=1.3, elinewidth=0.8, capsize=1.5, zorder=3, **curve_style(index)
            )


def _name_cases(axis: "Axes", cases: list[str]) -> None:
    """The names of the cases of a row right of its last panel, also of those that this panel does not have."""
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], **curve_style(index)) for index in range(len(cases))]
    axis.legend(
        handles,
        cases,
        loc="upper left",
        bbox_to_anchor=(1.02, 1.05),
        frameon=False,
        # a dozen names are as tall as the panel
        fontsize=7 if len(cases) <= FEW_CASES else 6.5,
        handlelength=2.4,
        labelspacing=0.25 if len(cases) <= FEW_CASES else 0,
    )


def _draw_floors(column: list["Axes"], task: TaskRecord) -> None:
    """A dotted line for each score that little knowledge reaches, with its name in the first panel.

    A floor far from all scores is left out: it would press these together."""
    low, high = column[0].get_ylim()
    for name, floor in task.floors.items():
        if low <= floor <= high:
            for axis in column:
                axis.axhline(floor, color=QUIET_COLOR, lw=0.7, ls=":", zorder=0)
            place = (0.01, floor)
            column[0].annotate(
                name, place, xycoords=("axes fraction", "data"), color=QUIET_COLOR, fontsize=6, va="bottom"
            )


def _label_lengths(axis: "Axes", task: TaskRecord) -> None:
    axis.set_xticks(range(len(task.lengths)), [f"{length:,}" for length in task.lengths])
    axis.set_xlim(-0.3, len(task.lengths) - 0.7)


def _label_costs(column: list["Axes"]) -> None:
    """A few plain numbers below a logarithmic scale: powers of ten, and two and five times these where it is short."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    low, high = column[0].get_xlim()
    subdivisions = (1.0,) if high / low > SHORT_SCALE else (1.0, 2.0, 5.0)
    for axis in column:
        axis.xaxis.set_major_locator(LogLocator(subs=subdivisions))
        axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        axis.xaxis.set_minor_locator(NullLocator())


def _share_scales(column: list["Axes"]) -> None:
    """The same limits for all panels of a task, and labels of the x axis at the lowest alone."""
    for axis in column:
        axis.set_xlim(min(a.get_xlim()[0] for a in column), max(a.get_xlim()[1] for a in column))
        axis.set_ylim(min(a.get_ylim()[0] for a in column), max(a.get_ylim()[1] for a in column))
    for axis in column[:-1]:
        axis.tick_params(labelbottom=False)


def _scores(task: TaskRecord, case: str) -> list[list[float]]:
    """The scores of each seed of a case at each value of the sweep; those that are missing are left out."""
    measured = [m.scores for m in task.results[EQUAL_STEPS].measured if m.case == case]
    return [
        [value for scores in at_value if (value := scores.get(task.score)) is not None and math.isfinite(value)]
        for at_value in zip(*measured)
    ]


def _at_cost(cost: float | None, task: TaskRecord, case: str) -> CasePoints | None:
    scores = _scores(task, case)
    if not cost or not scores or not scores[0]:
        return None
    return CasePoints([cost], [fmean(scores[0])], [min(scores[0])], [max(scores[0])])


def _by_state(suite: SuiteRecord, task: TaskRecord, case: str) -> CasePoints | None:
    """The score over the kilobytes of the state at the greatest length of the costs."""
    lengths = suite.costs[case].lengths if case in suite.costs else ()
    states = [cost.state_bytes for cost in lengths if cost.state_bytes]
    return _at_cost(states[-1] / 1000 if states else None, task, case)


def _by_seconds(suite: SuiteRecord, task: TaskRecord, case: str) -> CasePoints | None:
    """The score over the mean seconds of a training."""
    minutes = [m.minutes for m in task.results[EQUAL_STEPS].measured if m.case == case and m.minutes]
    return _at_cost(60 * fmean(minutes) if minutes else None, task, case)


def _by_length(suite: SuiteRecord, task: TaskRecord, case: str) -> CasePoints | None:
    """The score at each length that the task is scored at."""
    if len(task.lengths) < 2:
        return None
    scores = [(float(place), values) for place, values in enumerate(_scores(task, case)) if values]
    if not scores:
        return None
    return CasePoints(
        [place for place, _ in scores],
        [fmean(values) for _, values in scores],
        [min(values) for _, values in scores],
        [max(values) for _, values in scores],
    )


SUITE_FIGURES = (
    SuiteFigure("state.png", "state, kB", _by_state, costs=True),
    SuiteFigure("seconds.png", "training, s", _by_seconds, costs=True),
    SuiteFigure("length.png", "tokens", _by_length, costs=False),
)
