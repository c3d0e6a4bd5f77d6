"""Draw a benchmark report, and write it to a file."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from manyformer.bench.bench_report import MEMORY_TITLES, TITLES, BenchCell, BenchReport
from manyformer.bench.candidate import BenchKind
from manyformer.errors import UserError
from manyformer.files.atomic_files import atomic_write_text
from manyformer.view.figures import FORMATS, add_legend, curve_style, panels, write_picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def write_report(report: BenchReport, path: Path) -> None:
    """Write the report in the format of the suffix of `path`. Raises UserError."""
    if path.suffix.lower() not in (*FORMATS, ".csv", ".json"):
        raise UserError(f"{path} must end in .csv, .json or one of {', '.join(FORMATS)}: the ending decides the format")
    match path.suffix.lower():
        case ".csv":
            atomic_write_text(path, report.to_csv())
        case ".json":
            atomic_write_text(path, report.to_json() + "\n")
        case _:
            _draw(report, path)


def _draw(report: BenchReport, path: Path) -> None:
    """Time (top) and memory (bottom) against length on logarithmic axes, where a power law is a straight line."""
    kinds = report.kinds
    figure, axes = panels(2, len(kinds))
    for column, kind in enumerate(kinds):
        _panel(axes[column], report, kind, lambda cell: None if cell.seconds is None else 1e3 * cell.seconds)
        axes[column].set_title(TITLES[kind], fontsize="medium")
        _panel(axes[len(kinds) + column], report, kind, lambda cell: None if not cell.memory else cell.memory / 1e6)
        axes[len(kinds) + column].set_title(MEMORY_TITLES[kind], fontsize="medium")
    add_legend(axes[0])
    figure.suptitle(report.machine.description)
    write_picture(figure, path)


def _panel(axis: "Axes", report: BenchReport, kind: BenchKind, value: Callable[[BenchCell], float | None]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    for number, label in enumerate(report.labels):
        cells = [report.cell(label, kind, length) for length in report.lengths]
        points = [(cell.length, y) for cell in cells if (y := value(cell)) is not None]
        if points:
            xs, ys = zip(*points)
            axis.plot(xs, ys, marker="o", ms=3.5, lw=1.6, label=label, **curve_style(number))
    axis.set_xscale("log", base=2)
    axis.set(yscale="log", xlabel="length (tokens)")
    axis.set_xticks(report.lengths, [f"{length:,}" for length in report.lengths], minor=False)
    axis.set_xticks([], minor=True)
    # values within one decade would otherwise have no tick labels
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda number, _: f"{number:g}"))
    axis.yaxis.set_minor_formatter(NullFormatter())
