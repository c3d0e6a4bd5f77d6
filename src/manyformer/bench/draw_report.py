"""A report as a picture or a file."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from manyformer.bench.bench_report import MEMORY_TITLES, TITLES, BenchCell, BenchReport
from manyformer.bench.candidate import BenchKind
from manyformer.errors import UserError
from manyformer.view.figures import FORMATS, colour, panels, style, write_picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def check_target(path: Path) -> None:
    """Raise UserError where a report cannot be written under this name."""
    if path.suffix.lower() not in (*FORMATS, ".csv", ".json"):
        raise UserError(f"{path} must end in .csv, .json or one of {', '.join(FORMATS)}: the ending decides the format")


def write_report(report: BenchReport, path: Path) -> None:
    """Write what the ending of `path` asks for. Raises UserError."""
    check_target(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    match path.suffix.lower():
        case ".csv":
            path.write_text(report.to_csv(), encoding="utf-8")
        case ".json":
            path.write_text(report.to_json() + "\n", encoding="utf-8")
        case _:
            _draw(report, path)


def _draw(report: BenchReport, path: Path) -> None:
    """Time above, memory below, against length, both axes logarithmic: a power law is a straight line."""
    whats = report.whats
    figure, axes = panels(2, len(whats))
    for column, what in enumerate(whats):
        _panel(axes[column], report, what, lambda cell: None if cell.seconds is None else 1e3 * cell.seconds)
        axes[column].set_title(TITLES[what], fontsize="medium")
        _panel(axes[len(whats) + column], report, what, lambda cell: None if not cell.memory else cell.memory / 1e6)
        axes[len(whats) + column].set_title(MEMORY_TITLES[what], fontsize="medium")
    axes[0].legend(frameon=False, fontsize="small")
    figure.suptitle(report.machine.words)
    write_picture(figure, path)


def _panel(axis: "Axes", report: BenchReport, what: BenchKind, value: Callable[[BenchCell], float | None]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    for number, label in enumerate(report.labels):
        cells = [report.cell(label, what, length) for length in report.lengths]
        points = [(cell.length, y) for cell in cells if (y := value(cell)) is not None]
        if points:
            xs, ys = zip(*points)
            axis.plot(xs, ys, style(number), color=colour(number), marker="o", ms=3.5, lw=1.6, label=label)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(report.lengths, [f"{length:,}" for length in report.lengths], minor=False)
    axis.set_xticks([], minor=True)
    # values within one decade would otherwise have no number beside them
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda number, _: f"{number:g}"))
    axis.yaxis.set_minor_formatter(NullFormatter())
    axis.set_xlabel("length (tokens)")
