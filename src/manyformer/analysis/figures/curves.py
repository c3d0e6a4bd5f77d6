"""Figures with curves: metrics of runs over their steps, BLEU by the length of the source, and kernel regressions."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from manyformer.base.errors import UserError
from manyformer.base.files.figures import add_legend, check_picture, curve_color, curve_style, panels, write_picture
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


MAX_MARKED_POINTS = 60
"""Curves with at least this many points are drawn without markers."""


class RunCurves(NamedTuple):
    """The metrics of one run; `name` is that of its folder."""

    name: str
    rows: list[MetricsRow]

    def points(self, column: str) -> tuple[list[float], list[float]]:
        """The steps and values of one column, without the rows that have none."""
        pairs = [(row["step"], row[column]) for row in self.rows if row.get(column) is not None]
        return [float(step) for step, _ in pairs], [float(value) for _, value in pairs]


def plot_runs(runs: Sequence[str | Path], picture: str | Path) -> None:
    """Draw loss, validation, learning rate and gradient norm of the runs in these folders over their steps.

    The suffix of `picture` decides the format (.png, .svg or .pdf). Raises UserError if a folder has no metrics.
    """
    check_picture(Path(picture))
    if not runs:
        raise UserError("there is no run to draw: give at least one run folder")
    curves = [_read_curves(Path(run)) for run in runs]
    figure, axes = panels(2, 2)
    _draw_losses(axes[0], curves)
    _draw_validation(axes[1], curves)
    _draw_column(axes[2], curves, "learning_rate", "learning rate")
    _draw_column(axes[3], curves, "gradient_norm", "gradient norm")
    for axis in axes:
        axis.set_xlabel("step")
    # more names do not fit the width of the figure
    figure.suptitle(", ".join(run.name for run in curves) if len(curves) < 4 else f"{len(curves)} runs")
    write_picture(figure, Path(picture))


def _read_curves(folder: Path) -> RunCurves:
    file = folder / "metrics.jsonl"
    if not file.is_file():
        raise UserError(f"{folder} holds no run: {file.name} is missing")
    rows = list(read_rows(file))
    if not rows:
        raise UserError(f"{file} has no metrics yet: train the run for some steps")
    # resolved, because `.` or a link has no name that tells runs apart
    return RunCurves(folder.resolve().name, rows)


def _draw_losses(axis: "Axes", curves: list[RunCurves]) -> None:
    """Draw the losses in nats per token, or, of policies, whose objective says little, the entropy of the actions."""
    if any(run.points("entropy")[0] for run in curves):
        _draw_column(axis, curves, "entropy", "entropy of actions (nats)")
        return
    _draw_scores(axis, curves, "loss")
    axis.set_ylabel("loss (nats)")


def _draw_scores(axis: "Axes", curves: list[RunCurves], column: str) -> None:
    """Draw a score of all runs: training with thin lines, validation with thick ones."""
    has_several_runs = len(curves) > 1
    for index, run in enumerate(curves):
        label = f"{run.name}, " if has_several_runs else ""
        _draw_curve(axis, index, run.points(column), f"{label}training", width=0.9)
        _draw_curve(axis, index, run.points(f"valid_{column}"), f"{label}validation", width=2.2)
    add_legend(axis)


def _draw_validation(axis: "Axes", curves: list[RunCurves]) -> None:
    """Draw the usual validation metric: returns of policies, bits per byte for text, else accuracy."""
    if any(run.points("valid_return")[0] for run in curves):
        _draw_scores(axis, curves, "return")
        axis.set_ylabel("return of an episode")
        return
    has_bits_per_byte = any(run.points("valid_bits_per_byte")[0] for run in curves)
    column, label = ("valid_bits_per_byte", "bits per byte") if has_bits_per_byte else ("valid_accuracy", "accuracy")
    _draw_column(axis, curves, column, f"validation: {label}")


def _draw_column(axis: "Axes", curves: list[RunCurves], column: str, label: str) -> None:
    for index, run in enumerate(curves):
        _draw_curve(axis, index, run.points(column), run.name, width=1.4)
    axis.set_ylabel(label)
    if len(curves) > 1:
        add_legend(axis)


def _draw_curve(axis: "Axes", index: int, points: tuple[list[float], list[float]], label: str, *, width: float) -> None:
    steps, values = points
    if steps:
        marker = "o" if len(steps) < MAX_MARKED_POINTS else ""
        axis.plot(steps, values, linewidth=width, marker=marker, ms=3, label=label, **curve_style(index))


def draw_scores_by_length(scores: Mapping[str, Sequence[ScoreRecord]], picture: str | Path) -> None:
    """Draw a curve for each name: the values of `bleu_by_length` over the mean number of source words of each range.

    The figure is that of Bahdanau et al. 2015 (figure 2). The suffix of `picture` decides the format (.png, .svg or
    .pdf). Raises UserError for another suffix.
    """
    figure, (axis,) = panels(1, 1)
    for number, (name, records) in enumerate(scores.items()):
        mean_words = [record.parts["words"] for record in records]
        values = [record.value for record in records]
        axis.plot(mean_words, values, marker="o", label=name, **curve_style(number))
    axis.set_xlabel("words of the source, mean of each range")
    axis.set_ylabel("BLEU")
    add_legend(axis)
    write_picture(figure, Path(picture))


def draw_regression(regression: KernelRegression, choices: Sequence[BandwidthChoice], path: Path) -> None:
    """Write the figure: left the points, the function and the fit of each choice, right the leave-one-out error."""
    figure, (fits, errors) = panels(1, 2)
    query = torch.linspace(0, INTERVAL_END, 200, dtype=torch.float64)[:, None]
    x, y = (values[:, 0].tolist() for values in regression.sample)
    fits.plot(x, y, "o", color="#999999", markersize=3, label="points")
    fits.plot(query[:, 0].tolist(), textbook_function(query)[:, 0].tolist(), color="#000000", label="function")
    grid = bandwidth_grid()
    errors.plot(grid, [regression.leave_one_out(bandwidth) for bandwidth in grid], color="#000000")
    for index, choice in enumerate(choices):
        label = f"{choice.method}: {choice.bandwidth:.3g}"
        color = curve_color(index)
        fits.plot(
            query[:, 0].tolist(), regression.predict(choice.bandwidth, query)[:, 0].tolist(), color=color, label=label
        )
        errors.plot([choice.bandwidth], [choice.leave_one_out], "o", color=color)
    errors.set_xscale("log")
    fits.set(xlabel="x", ylabel="y", title=f"Nadaraya-Watson, {regression.kernel} kernel")
    errors.set(xlabel="bandwidth", ylabel="leave-one-out error", title="Choice of the bandwidth")
    add_legend(fits)
    write_picture(figure, path)
