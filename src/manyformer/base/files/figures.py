"""Shared parts of all figures: a color-blind-safe palette, panels, and atomic writing of picture files."""

import atexit
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manyformer.base.errors import UserError
from manyformer.base.files.atomic_files import atomic_write

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito 2008, "Color Universal Design"
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
LINE_STYLES = ("-", "--", ":", "-.")
FORMATS = (".png", ".svg", ".pdf")

DPI = 150

PANEL_INCHES = (5.2, 3.4)
"""The size of one panel in inches."""


def panels(
    rows: int, columns: int, inches: tuple[float, float] = PANEL_INCHES, *, grid: bool = True
) -> tuple["Figure", list["Axes"]]:
    """A figure with `rows` x `columns` panels of this width and height, and its axes, row by row; it needs no display.

    Panels without a `grid` keep their frame.
    """
    # not pyplot, which keeps references to figures and requires a display
    from matplotlib.figure import Figure

    figure = Figure(figsize=(inches[0] * columns, inches[1] * rows), layout="constrained")
    # one by one, because `subplots` gives an array whose shape depends on the numbers
    axes = [figure.add_subplot(rows, columns, index + 1) for index in range(rows * columns)]
    for axis in axes if grid else ():
        axis.grid(visible=True, color="#dddddd", linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _give_matplotlib_a_folder() -> None:
    """Another folder for the settings and caches of matplotlib where the user's home cannot even be looked up.

    It finds one by itself where a home cannot be written, but fails where its links lead in a circle.
    """
    if "MPLCONFIGDIR" in os.environ:
        return
    try:
        (Path.home() / ".config").resolve()
    except (RuntimeError, OSError):
        folder = tempfile.mkdtemp(prefix="manyformer-matplotlib-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        os.environ["MPLCONFIGDIR"] = folder


# here, because whoever draws imports this module, and some of them parts of matplotlib before they have a figure
_give_matplotlib_a_folder()


def curve_color(index: int) -> str:
    """The color of the curve with this index."""
    return COLORS[index % len(COLORS)]


def curve_style(index: int) -> dict[str, Any]:
    """Color and line style of the curve with this index; the style changes when the colors repeat."""
    return {"color": curve_color(index), "linestyle": LINE_STYLES[index // len(COLORS) % len(LINE_STYLES)]}


def add_legend(axis: "Axes") -> None:
    """Add a legend without a frame, if any curve has a label."""
    if axis.get_legend_handles_labels()[0]:
        axis.legend(frameon=False, fontsize="small")


def check_picture(path: Path) -> None:
    """Raise UserError if the suffix of the path is not a picture format."""
    if path.suffix.lower() not in FORMATS:
        raise UserError(f"{path} must end in one of {', '.join(FORMATS)}: the suffix decides the format")


def write_picture(figure: "Figure", path: Path) -> None:
    """Write the figure atomically, so that no partial file is ever visible. Raises UserError."""
    check_picture(path)
    with atomic_write(path) as file:
        figure.savefig(file, format=path.suffix.lower()[1:], dpi=DPI)
