"""Sheets of images: samples beside each other, and begun images with what became of them."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from manyformer.view.figures import DPI, write_picture

ImageArray = NDArray[np.uint8]
"""Images (n, h, w, c) in brightness from 0 to 255; c is 1 or 3."""

SIDE = 84
"""An image is magnified by a whole number to about this many dots."""

GAP = 6
"""Dots between images."""

HEAD = 30
"""Dots for words above columns."""

PAPER, UNKNOWN = (255, 255, 255), (86, 140, 180)
"""What lies between images, and where an image is still to be written."""


def draw_samples(images: ImageArray, path: Path) -> None:
    """Images in a sheet about as wide as high, row by row: PNG, SVG or PDF."""
    columns = math.ceil(math.sqrt(len(images)))
    coloured = [_coloured(image) for image in images]
    rows = [coloured[first : first + columns] for first in range(0, len(coloured), columns)]
    _write(rows, path, {})


def draw_completed(originals: ImageArray, completed: ImageArray, rows: int, path: Path) -> None:
    """A line an image: its first `rows` rows, what was made of them (as many images each), and how it really went on.

    PNG, SVG or PDF.
    """
    tries = len(completed) // len(originals)
    lines = []
    for number, original in enumerate(originals):
        begun = _coloured(original).copy()
        begun[rows:] = UNKNOWN
        made = completed[number * tries : (number + 1) * tries]
        lines.append([begun, *map(_coloured, made), _coloured(original)])
    _write(lines, path, {0: "given", 1: "completed", tries + 1: "original"})


def _coloured(image: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return np.broadcast_to(image, (*image.shape[:2], 3))


def _write(rows: Sequence[Sequence[NDArray[np.uint8]]], path: Path, words: dict[int, str]) -> None:
    """Images in rows and columns, `words` above the columns of these numbers, dot for dot."""
    # not pyplot, which keeps figures alive and looks for a display
    from matplotlib.figure import Figure

    height, width, _ = rows[0][0].shape
    zoom = max(1, round(SIDE / max(height, width)))
    high, wide, head = height * zoom + GAP, width * zoom + GAP, HEAD if words else 0
    sheet = np.full((len(rows) * high + GAP, len(rows[0]) * wide + GAP, 3), PAPER, np.uint8)
    for number, row in enumerate(rows):
        for column, image in enumerate(row):
            top, left = number * high + GAP, column * wide + GAP
            sheet[top : top + height * zoom, left : left + width * zoom] = image.repeat(zoom, 0).repeat(zoom, 1)
    whole = sheet.shape[0] + head
    figure = Figure(figsize=(sheet.shape[1] / DPI, whole / DPI))
    axis = figure.add_axes((0, 0, 1, sheet.shape[0] / whole))
    axis.imshow(sheet, interpolation="none", aspect="auto")
    axis.set_axis_off()
    for column, word in words.items():
        left = (column * wide + GAP) / sheet.shape[1]
        figure.text(left, 1 - 0.5 * head / whole, word, fontsize=8, ha="left", va="center")
    write_picture(figure, path)
