"""The style of all figures: colors, lines and markers, panels, legends, and atomic writing of picture files."""

import atexit
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manyformer.base.errors import UserError
from manyformer.base.files.atomic_files import atomic_write

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = ("#0072b2", "#d55e00", "#009e73", "#000000", "#cc79a7")
"""The colors of Okabe and Ito 2008, "Color Universal Design", that have a contrast of 3 to 1 to white."""

BACKGROUND_COLOR = "#c4c8ce"
"""The color of what stands behind the curves that a panel is about."""

QUIET_COLOR = "#5f6670"
"""The color of floors, notes and single values beside their mean."""

LINE_STYLES = ("-", "--", ":", "-.")
MARKERS = "os^Dv*PX<"
FORMATS = (".png", ".svg", ".pdf")

DPI = 150

PANEL_INCHES = (4.2, 2.9)
"""The size of one panel in inches: two beside each other have fonts of 8 points on a page of 7 inches."""

MARKED_POINTS = 8
"""The markers of a curve with more points."""

LEGEND_ROW_INCHES = 0.22
LEGEND_CHARACTER_INCHES = 0.075
"""The height of a row of a legend, and the mean width of a character."""


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


def curve_style(index: int, points: int = 1) -> dict[str, Any]:
    """Color, line style and marker of the curve with this index.

    Neighbors differ in all three, so that curves can be told apart in gray. Of many `points` only some are marked.
    """
    style: dict[str, Any] = {
        "color": curve_color(index),
        "linestyle": LINE_STYLES[index % len(LINE_STYLES)],
        "marker": MARKERS[index % len(MARKERS)],
        "markersize": 4,
    }
    if points > 2 * MARKED_POINTS:
        step = points // MARKED_POINTS
        # markers of neighbors at other points, so that curves that lie on each other show both
        style["markevery"] = (index * step // 3 % step, step)
    return style


def lighten(color: str, share: float = 0.45) -> str:
    """The color mixed with this share of white."""
    channels = (int(color[start : start + 2], 16) for start in (1, 3, 5))
    return "#" + "".join(f"{round(channel + share * (255 - channel)):02x}" for channel in channels)


def add_legend(figure: "Figure", handles: Mapping[str, Any] | None = None) -> None:
    """Add a legend below all panels, where it covers no data; the figure grows by its rows.

    `handles` are the drawn lines by their labels, by default all of the figure, each label once."""
    if handles is None:
        handles = {}
        for axis in figure.axes:
            lines, labels = axis.get_legend_handles_labels()
            handles |= {str(label): line for label, line in zip(labels, lines)}
    if not handles:
        return
    width, height = figure.get_size_inches()
    entry_inches = 0.55 + LEGEND_CHARACTER_INCHES * max(map(len, handles))
    columns = max(1, min(len(handles), int(width / entry_inches)))
    rows = -(-len(handles) // columns)
    figure.set_size_inches(width, height + LEGEND_ROW_INCHES * rows)
    figure.legend(
        list(handles.values()),
        list(handles),
        loc="outside lower center",
        ncols=columns,
        frameon=False,
        fontsize="small",
        handlelength=2.6,
    )


def check_picture(path: Path) -> None:
    """Raise UserError if the suffix of the path is not a picture format."""
    if path.suffix.lower() not in FORMATS:
        raise UserError(f"{path} must end in one of {', '.join(FORMATS)}: the suffix decides the format")


def write_picture(figure: "Figure", path: Path) -> None:
    """Write the figure atomically, so that no partial file is ever visible. Raises UserError."""
    check_picture(path)
    from matplotlib import rc_context

    file_format = path.suffix.lower()[1:]
    # without the time of writing, and with names of parts that depend on the picture alone: equal pictures, equal files
    metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(file_format)
    # fonts of a PDF as outlines that every publisher takes
    with atomic_write(path) as file, rc_context({"svg.hashsalt": "manyformer", "pdf.fonttype": 42}):
        figure.savefig(file, format=file_format, dpi=DPI, metadata=metadata)
