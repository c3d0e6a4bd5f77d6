"""Figures with curves: metrics of runs over their steps, BLEU by the length of the source, and kernel regressions."""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from manyformer.base.errors import UserError
from manyformer.base.files.figures import (
    BACKGROUND_COLOR,
    MARKERS,
    PANEL_INCHES,
    QUIET_COLOR,
    add_legend,
    check_picture,
    curve_color,
    curve_style,
    lighten,
    panels,
    write_picture,
)
from manyformer.models.scores import ScoreRecord
from manyformer.nn.kernels.kernel_regression import (
    INTERVAL_END,
    BandwidthChoice,
    KernelRegression,
    bandwidth_grid,
    textbook_function,
)
from manyformer.training.metrics import MetricsRow, read_rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from manyformer.training.rate_search import RateTest


FIGURE_INCHES = 8.4
"""The width of the figure of runs."""

MIN_COLUMN_INCHES = 3.2
"""A narrower figure has its panels below each other, as a column of a page needs them."""

TITLE_CHARACTERS_PER_INCH = 11

NAMED_RUNS = 3
"""The most runs whose names fit the title of a figure."""

TRAINING = "training"
VALIDATION = "validation"


class RunCurves(NamedTuple):
    """The metrics of one run; `name` is that of its folder."""

    name: str
    rows: list[MetricsRow]

    def points(self, column: str) -> tuple[list[float], list[float]]:
        """The steps and values of one column, without the rows that have none."""
        pairs = [(row["step"], row[column]) for row in self.rows if row.get(column) is not None]
        return [float(step) for step, _ in pairs], [float(value) for _, value in pairs]


class Curve(NamedTuple):
    """One metric of one run over its steps, of the training or of the validation."""

    label: str
    run: int
    kind: str
    column: str
    steps: list[float]
    values: list[float]


class CurvePanel(NamedTuple):
    """The curves of one metric; only those with points."""

    label: str
    curves: list[Curve]

    @property
    def has_lines(self) -> bool:
        return any(len(curve.steps) > 1 for curve in self.curves)

    @property
    def note(self) -> str:
        """The single value of a panel that is not drawn."""
        curve = self.curves[0]
        return f"{self.label} {curve.values[0]:.4g} at step {curve.steps[0]:,.0f}"


def plot_runs(
    runs: Sequence[str | Path],
    picture: str | Path,
    *,
    width: float = FIGURE_INCHES,
    references: Sequence[RunCurves] = (),
) -> None:
    """Draw loss, validation, learning rate and gradient norm of the runs in these folders over their steps.

    `width` is that of the figure in inches; below 6.4 the panels stand below each other. `references` are
    drawn in gray behind the runs, with one entry of the legend for each name. The suffix of `picture`
    decides the format (.png, .svg or .pdf). Raises UserError if a folder has no metrics.
    """
    check_picture(Path(picture))
    if not runs:
        raise UserError("there is no run to draw: give at least one run folder")
    curves = [read_curves(Path(run)) for run in runs]
    drawn, notes = _choose_panels(curves)
    columns = 2 if len(drawn) > 1 and width >= 2 * MIN_COLUMN_INCHES else 1
    # one panel alone is no wider than one of two
    panel_width = width / columns if len(drawn) > 1 else min(width, PANEL_INCHES[0] * 1.3)
    rows = -(-len(drawn) // columns)
    figure, axes = panels(rows, columns, (panel_width, panel_width * PANEL_INCHES[1] / PANEL_INCHES[0]))
    for axis, panel in zip(axes, drawn):
        if panel.has_lines:
            _draw_references(axis, panel, references)
            _draw_lines(axis, panel, len(curves))
        else:
            _draw_single_values(axis, panel, len(curves))
    for axis in axes[len(drawn) :]:
        axis.remove()
    names = ", ".join(run.name for run in curves) if len(curves) <= NAMED_RUNS else f"{len(curves)} runs"
    note = textwrap.fill("; ".join(notes), int(TITLE_CHARACTERS_PER_INCH * figure.get_figwidth()))
    figure.suptitle(f"{names}\n{note}".strip(), fontsize="medium")
    add_legend(figure, _legend_handles(drawn, curves, references))
    write_picture(figure, Path(picture))


def read_curves(folder: Path) -> RunCurves:
    """The metrics of the run in a folder. Raises UserError if there are none."""
    file = folder / "metrics.jsonl"
    if not file.is_file():
        raise UserError(f"{folder} holds no run: {file.name} is missing")
    rows = list(read_rows(file))
    if not rows:
        raise UserError(f"{file} has no metrics yet: train the run for some steps")
    # resolved, because `.` or a link has no name that tells runs apart
    return RunCurves(folder.resolve().name, rows)


def _choose_panels(curves: list[RunCurves]) -> tuple[list[CurvePanel], list[str]]:
    """The panels to draw, and the values that are told instead because a panel would have a single dot."""
    candidates = [
        _loss_panel(curves),
        _validation_panel(curves),
        _column_panel(curves, "learning_rate", "learning rate", TRAINING),
        _column_panel(curves, "gradient_norm", "gradient norm", TRAINING),
    ]
    candidates = [panel for panel in candidates if panel.curves]
    drawn = [panel for panel in candidates if panel.has_lines or len(panel.curves) > 1]
    if not drawn:
        # a run of one row: its loss is all there is to see
        drawn = candidates[:1]
    return drawn, [panel.note for panel in candidates if panel not in drawn]


def _loss_panel(curves: list[RunCurves]) -> CurvePanel:
    """The losses in nats per token, or, of policies, whose objective says little, the entropy of the actions."""
    if any(run.points("entropy")[0] for run in curves):
        return _column_panel(curves, "entropy", "entropy of actions (nats)", TRAINING)
    return _score_panel(curves, "loss", "loss (nats)")


def _validation_panel(curves: list[RunCurves]) -> CurvePanel:
    """The usual validation metric: returns of policies, bits per byte for text, else accuracy."""
    if any(run.points("valid_return")[0] for run in curves):
        return _score_panel(curves, "return", "return of an episode")
    if any(run.points("valid_bits_per_byte")[0] for run in curves):
        return _column_panel(curves, "valid_bits_per_byte", "validation: bits per byte", VALIDATION)
    return _column_panel(curves, "valid_accuracy", "validation: accuracy", VALIDATION)


def _score_panel(curves: list[RunCurves], column: str, label: str) -> CurvePanel:
    """A score of all runs, of the training and of the validation."""
    scores = []
    for index, run in enumerate(curves):
        prefix = f"{run.name}, " if len(curves) > 1 else ""
        scores.append(Curve(f"{prefix}{TRAINING}", index, TRAINING, column, *run.points(column)))
        scores.append(
            Curve(f"{prefix}{VALIDATION}", index, VALIDATION, f"valid_{column}", *run.points(f"valid_{column}"))
        )
    return CurvePanel(label, [curve for curve in scores if curve.steps])


def _column_panel(curves: list[RunCurves], column: str, label: str, kind: str) -> CurvePanel:
    columns = [Curve(run.name, index, kind, column, *run.points(column)) for index, run in enumerate(curves)]
    return CurvePanel(label, [curve for curve in columns if curve.steps])


def _style(curve: Curve, runs: int, panel: CurvePanel) -> dict[str, Any]:
    """Training is solid, validation dashed; of one run they have two colors, of several a light and a full one."""
    has_both = len({other.kind for other in panel.curves}) > 1
    is_validation = curve.kind == VALIDATION
    style = curve_style(curve.run, len(curve.steps))
    if runs == 1:
        style["color"] = curve_color(1 if is_validation else 0)
        # few values of a validation are marked, many of a training are not
        style["marker"] = MARKERS[1] if is_validation or len(curve.steps) == 1 else ""
    elif has_both and not is_validation:
        style["color"] = lighten(style["color"])
    return style | {
        "linestyle": "--" if is_validation else "-",
        "linewidth": 1.7 if is_validation else 1.2,
        # above all curves of training, which have more noise
        "zorder": 3 if is_validation else 2,
    }


def _draw_references(axis: "Axes", panel: CurvePanel, references: Sequence[RunCurves]) -> None:
    columns = {curve.column: curve.kind for curve in panel.curves}
    for run in references:
        for column, kind in columns.items():
            style = "--" if kind == VALIDATION else "-"
            axis.plot(*run.points(column), color=BACKGROUND_COLOR, linestyle=style, linewidth=1.2, zorder=1)


def _draw_lines(axis: "Axes", panel: CurvePanel, runs: int) -> None:
    last_step = max(curve.steps[-1] for curve in panel.curves)
    for curve in panel.curves:
        axis.plot(curve.steps, curve.values, label=curve.label, **_style(curve, runs, panel))
        if curve.steps == [last_step]:
            # a marker alone is easily missed; after the last step no curve can lie below the number
            place = (curve.steps[0], curve.values[0])
            axis.annotate(
                f"{curve.values[0]:.4g}", place, (6, 0), textcoords="offset points", va="center", size="small"
            )
            axis.margins(x=0.12)
    axis.set(xlabel="step", ylabel=panel.label)


def _draw_single_values(axis: "Axes", panel: CurvePanel, runs: int) -> None:
    """A row for each curve with its only value, written beside it."""
    for row, curve in enumerate(panel.curves):
        axis.plot(curve.values, [row], label=curve.label, **_style(curve, runs, panel))
        place = (curve.values[0], row)
        axis.annotate(
            f"{curve.values[0]:.4g}", place, (0, 6), textcoords="offset points", ha="center", fontsize="small"
        )
    axis.set_yticks(range(len(panel.curves)), [curve.label for curve in panel.curves])
    # downwards, as they are read
    axis.set_ylim(len(panel.curves) - 0.5, -0.7)
    axis.margins(x=0.2)
    steps = sorted({curve.steps[0] for curve in panel.curves})
    axis.set_xlabel(f"{panel.label} at step {', '.join(f'{step:,.0f}' for step in steps[:NAMED_RUNS])}")


def _legend_handles(
    drawn: list[CurvePanel], curves: list[RunCurves], references: Sequence[RunCurves]
) -> dict[str, Any]:
    """What the lines of all panels mean: the two kinds of curves and, of several, the runs by color and marker."""
    from matplotlib.lines import Line2D

    handles: dict[str, Any] = {}
    if len(curves) > 1:
        for index, run in enumerate(curves):
            label = run.name if run.name not in handles else f"{run.name} ({index + 1})"
            handles[label] = Line2D(
                [], [], color=curve_color(index), marker=MARKERS[index % len(MARKERS)], markersize=4
            )
    lines = {curve.kind: (curve, panel) for panel in drawn if panel.has_lines for curve in panel.curves}
    for kind, (curve, panel) in lines.items():
        style = _style(curve, len(curves), panel)
        style.pop("markevery", None)
        if len(curves) > 1:
            style |= {"color": QUIET_COLOR, "marker": ""}
        handles[kind] = Line2D([], [], **style)
    return handles | {run.name: Line2D([], [], color=BACKGROUND_COLOR) for run in references}


def draw_scores_by_length(scores: Mapping[str, Sequence[ScoreRecord]], picture: str | Path) -> None:
    """Draw a curve for each name: the values of `bleu_by_length` over the mean number of source words of each range.

    The figure is that of Bahdanau et al. 2015 (figure 2). The suffix of `picture` decides the format (.png, .svg or
    .pdf). Raises UserError for another suffix.
    """
    figure, (axis,) = panels(1, 1)
    for number, (name, records) in enumerate(scores.items()):
        mean_words = [record.parts["words"] for record in records]
        values = [record.value for record in records]
        axis.plot(mean_words, values, label=name, **curve_style(number))
    axis.set_xlabel("words of the source, mean of each range")
    axis.set_ylabel("BLEU")
    add_legend(figure)
    write_picture(figure, Path(picture))


def draw_rate_test(test: "RateTest", path: Path) -> None:
    """Write the figure of a learning-rate range test: the loss over the rate, and the suggested rate."""
    figure, (axis,) = panels(1, 1)
    axis.plot(test.rates, test.losses, "o", color=BACKGROUND_COLOR, markersize=3, label="loss of a step")
    axis.plot(test.rates, test.smoothed, color=curve_color(0), label="smoothed")
    if test.suggested is not None:
        axis.axvline(test.suggested, color=curve_color(1), linestyle="--", label=f"suggested: {test.suggested:g}")
    axis.set_xscale("log")
    # a diverged loss at the end would flatten the part that decides
    axis.set_ylim(top=max(test.smoothed[0], *test.losses[: len(test.losses) // 2]) * 1.1)
    axis.set_xlabel("learning rate")
    axis.set_ylabel("loss (nats)")
    add_legend(figure)
    write_picture(figure, path)


def draw_regression(regression: KernelRegression, choices: Sequence[BandwidthChoice], path: Path) -> None:
    """Write the figure: left the points, the function and the fit of each choice, right the leave-one-out error."""
    figure, (fits, errors) = panels(1, 2)
    query = torch.linspace(0, INTERVAL_END, 200, dtype=torch.float64)[:, None]
    x, y = (values[:, 0].tolist() for values in regression.sample)
    fits.plot(x, y, "o", color=BACKGROUND_COLOR, markersize=3, label="points")
    fits.plot(query[:, 0].tolist(), textbook_function(query)[:, 0].tolist(), color=QUIET_COLOR, lw=3, label="function")
    grid = bandwidth_grid()
    errors.plot(grid, [regression.leave_one_out(bandwidth) for bandwidth in grid], color=QUIET_COLOR)
    for index, choice in enumerate(choices):
        label = f"{choice.method}: {choice.bandwidth:.3g}"
        fit = regression.predict(choice.bandwidth, query)[:, 0].tolist()
        style = curve_style(index, len(fit))
        fits.plot(query[:, 0].tolist(), fit, label=label, **style)
        errors.plot([choice.bandwidth], [choice.leave_one_out], color=style["color"], marker=style["marker"])
    errors.set_xscale("log")
    fits.set(xlabel="x", ylabel="y", title=f"Nadaraya-Watson, {regression.kernel} kernel")
    errors.set(xlabel="bandwidth", ylabel="leave-one-out error", title="Choice of the bandwidth")
    add_legend(figure)
    write_picture(figure, path)
