"""What all drawings share: colours that the colour-blind can tell apart, and how a picture reaches the disk."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from manyformer.errors import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito 2008, "Color Universal Design"
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
STYLES = ("-", "--", ":", "-.")
FORMATS = (".png", ".svg", ".pdf")

DPI = 150

PANEL = (5.2, 3.4)
"""The size of one panel in inches."""


def panels(rows: int, columns: int) -> tuple["Figure", list["Axes"]]:
    """A figure with `rows` x `columns` panels, row by row; it needs no display."""
    # not pyplot, which keeps figures alive and looks for a display
    from matplotlib.figure import Figure

    figure = Figure(figsize=(PANEL[0] * columns, PANEL[1] * rows), layout="constrained")
    axes = [figure.add_subplot(rows, columns, number + 1) for number in range(rows * columns)]
    for axis in axes:
        axis.grid(visible=True, color="#dddddd", linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


def colour(number: int) -> str:
    """A colour for the curve `number`."""
    return COLOURS[number % len(COLOURS)]


def style(number: int) -> str:
    """A line style for the curve `number`, another one when the colours begin again."""
    return STYLES[number // len(COLOURS) % len(STYLES)]


def check_picture(path: Path) -> None:
    """Raise UserError where no picture can be written under this name."""
    if path.suffix.lower() not in FORMATS:
        raise UserError(f"{path} must end in one of {', '.join(FORMATS)}: the ending decides the format")


def write_picture(figure: "Figure", path: Path) -> None:
    """Write the picture beside its place first, so that no half of one is ever seen. Raises UserError."""
    check_picture(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}-{os.getpid()}{path.suffix}")
    try:
        figure.savefig(draft, dpi=DPI)
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)
