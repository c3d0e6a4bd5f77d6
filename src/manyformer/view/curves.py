"""The curves of training runs, several of them in one picture."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from manyformer.errors import UserError
from manyformer.train.metrics import read_rows
from manyformer.view.figures import check_picture, colour, panels, style, write_picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MetricsRow = dict[str, Any]

CRAMPED = 60
"""From this many points on a curve is drawn without marks."""


class RunCurves(NamedTuple):
    """The metrics of one run, under the name of its folder."""

    name: str
    rows: list[MetricsRow]

    def of(self, column: str) -> tuple[list[float], list[float]]:
        """Steps and values of one column, where it has any."""
        pairs = [(row["step"], row[column]) for row in self.rows if row.get(column) is not None]
        return [float(step) for step, _ in pairs], [float(value) for _, value in pairs]


def plot_runs(runs: Sequence[str | Path], picture: str | Path) -> None:
    """Draw loss, validation, learning rate and gradient norm of the runs in these folders over their steps.

    The ending of `picture` decides the format (.png, .svg or .pdf). Raises UserError where a folder has no metrics.
    """
    check_picture(Path(picture))
    if not runs:
        raise UserError("there is no run to draw: give at least one run folder")
    curves = [_read(Path(run)) for run in runs]
    figure, axes = panels(2, 2)
    _losses(axes[0], curves)
    _validation(axes[1], curves)
    _column(axes[2], curves, "learning_rate", "learning rate")
    _column(axes[3], curves, "gradient_norm", "gradient norm")
    for axis in axes:
        axis.set_xlabel("step")
    figure.suptitle(", ".join(run.name for run in curves) if len(curves) < 4 else f"{len(curves)} runs")
    write_picture(figure, Path(picture))


def _read(folder: Path) -> RunCurves:
    file = folder / "metrics.jsonl"
    if not file.is_file():
        raise UserError(f"{folder} holds no run: {file.name} is missing")
    rows = list(read_rows(file))
    if not rows:
        raise UserError(f"{file} has no metrics yet: train the run for some steps")
    return RunCurves(folder.resolve().name, rows)


def _losses(axis: "Axes", curves: list[RunCurves]) -> None:
    """Training thin, validation thick, in nats per token."""
    several = len(curves) > 1
    for number, run in enumerate(curves):
        label = f"{run.name}, " if several else ""
        _draw(axis, number, run.of("loss"), f"{label}training", width=0.9)
        _draw(axis, number, run.of("valid_loss"), f"{label}validation", width=2.2)
    axis.set_ylabel("loss (nats)")
    _legend(axis)


def _validation(axis: "Axes", curves: list[RunCurves]) -> None:
    """What people ask of held-out data: bits per byte for text, else accuracy."""
    bits = any(run.of("valid_bits_per_byte")[0] for run in curves)
    column, label = ("valid_bits_per_byte", "bits per byte") if bits else ("valid_accuracy", "accuracy")
    _column(axis, curves, column, f"validation: {label}")


def _column(axis: "Axes", curves: list[RunCurves], column: str, label: str) -> None:
    for number, run in enumerate(curves):
        _draw(axis, number, run.of(column), run.name, width=1.4)
    axis.set_ylabel(label)
    if len(curves) > 1:
        _legend(axis)


def _draw(axis: "Axes", number: int, points: tuple[list[float], list[float]], label: str, *, width: float) -> None:
    steps, values = points
    if steps:
        mark = "o" if len(steps) < CRAMPED else ""
        line: Callable[..., Any] = axis.plot
        line(steps, values, style(number), color=colour(number), linewidth=width, marker=mark, ms=3, label=label)


def _legend(axis: "Axes") -> None:
    if axis.get_legend_handles_labels()[0]:
        axis.legend(frameon=False, fontsize="small")
