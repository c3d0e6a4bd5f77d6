"""Pictures of images: sheets of generated samples and of completed images, and animated episodes."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from manyformer.base.errors import UserError
from manyformer.base.files.atomic_files import atomic_write
from manyformer.base.files.figures import DPI, write_picture
from manyformer.base.type_aliases import ImageArray

IMAGE_DOTS = 84
"""The approximate side of a drawn image, which is magnified by an integer factor."""

GAP_DOTS = 6
"""Dots between images."""

HEADING_DOTS = 30
"""Dots for the headings above columns."""

BACKGROUND = (255, 255, 255)
MISSING_PIXELS = (86, 140, 180)
"""The colors between images, and of pixels that are still to be generated."""


def draw_samples(images: ImageArray, path: Path) -> None:
    """Draw images in an approximately square sheet, row by row: PNG, SVG or PDF."""
    columns = math.ceil(math.sqrt(len(images)))
    rgb_images = [_to_rgb(image) for image in images]
    rows = [rgb_images[start : start + columns] for start in range(0, len(rgb_images), columns)]
    _write_sheet(rows, path, {})


def draw_completed(originals: ImageArray, completed: ImageArray, rows: int, path: Path) -> None:
    """Draw one row per image: its first `rows` rows, its completions (equally many per image) and the original.

    PNG, SVG or PDF.
    """
    tries = len(completed) // len(originals)
    sheet_rows = []
    for index, original in enumerate(originals):
        # a copy, because a broadcast gray image shares its memory with the original
        prefix = _to_rgb(original).copy()
        prefix[rows:] = MISSING_PIXELS
        completions = completed[index * tries : (index + 1) * tries]
        sheet_rows.append([prefix, *map(_to_rgb, completions), _to_rgb(original)])
    _write_sheet(sheet_rows, path, {0: "given", 1: "completed", tries + 1: "original"})


def draw_rows(rows: Sequence[ImageArray], path: Path, headings: dict[int, str] | None = None) -> None:
    """Draw rows of equally many images of one size, with `headings` above the columns of these indices.

    PNG, SVG or PDF."""
    _write_sheet([[_to_rgb(image) for image in row] for row in rows], path, headings or {})


def _to_rgb(image: NDArray[np.uint8]) -> NDArray[np.uint8]:
    # gray images have one channel, which is a view of three without a copy
    return np.broadcast_to(image, (*image.shape[:2], 3))


def _write_sheet(rows: Sequence[Sequence[NDArray[np.uint8]]], path: Path, headings: dict[int, str]) -> None:
    """Write a sheet of images, pixel by pixel, with `headings` above the columns of these indices."""
    # not pyplot, which keeps references to figures and requires a display
    from matplotlib.figure import Figure

    height, width, _ = rows[0][0].shape
    # whole factors alone, which keep pixels square and sharp
    zoom = max(1, round(IMAGE_DOTS / max(height, width)))
    row_height = height * zoom + GAP_DOTS
    column_width = width * zoom + GAP_DOTS
    heading_height = HEADING_DOTS if headings else 0
    shape = len(rows) * row_height + GAP_DOTS, len(rows[0]) * column_width + GAP_DOTS, 3
    sheet = np.full(shape, BACKGROUND, np.uint8)
    for row_index, row in enumerate(rows):
        for column, image in enumerate(row):
            top = row_index * row_height + GAP_DOTS
            left = column * column_width + GAP_DOTS
            sheet[top : top + height * zoom, left : left + width * zoom] = image.repeat(zoom, 0).repeat(zoom, 1)
    figure_height = sheet.shape[0] + heading_height
    # as many dots as the sheet has pixels, so that nothing is interpolated
    figure = Figure(figsize=(sheet.shape[1] / DPI, figure_height / DPI))
    axis = figure.add_axes((0, 0, 1, sheet.shape[0] / figure_height))
    axis.imshow(sheet, interpolation="none", aspect="auto")
    axis.set_axis_off()
    for column, heading in headings.items():
        left = (column * column_width + GAP_DOTS) / sheet.shape[1]
        figure.text(left, 1 - 0.5 * heading_height / figure_height, heading, fontsize=8, ha="left", va="center")
    write_picture(figure, path)


def check_animation(path: Path) -> None:
    """Raise UserError if the suffix of the path is not that of an animated picture."""
    if path.suffix.lower() != ".gif":
        raise UserError(f"{path}: an episode is drawn as .gif, not as '{path.suffix}'")


def write_animation(frames: Sequence[NDArray[np.uint8]], path: Path, *, milliseconds: int) -> None:
    """Write frames (height, width, 3) as a GIF that is repeated endlessly. Raises UserError where Pillow is missing."""
    check_animation(path)
    try:
        from PIL import Image
    except ImportError as error:
        raise UserError('animations need one more library: pip install "manyformer[data]"') from error
    first, *rest = (Image.fromarray(frame) for frame in frames)
    with atomic_write(path) as file:
        first.save(file, format="GIF", save_all=True, append_images=rest, duration=milliseconds, loop=0)
