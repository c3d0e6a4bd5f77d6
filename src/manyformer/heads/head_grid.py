"""Measures of heads as grids of layers by heads, one for each kind of attention, as tables and as a picture."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from manyformer.view.figures import check_picture, panels, write_picture

CELL_INCHES = (0.95, 0.5)
"""The size of a head in a picture."""


class HeadGrid(NamedTuple):
    """A measure of each head of the layers with one kind of attention, and a text for each head."""

    kind: str
    parts: tuple[str, ...]
    values: tuple[tuple[float, ...], ...]
    texts: tuple[tuple[str, ...], ...]


def _decimals(values: Iterable[float]) -> int:
    """The decimals that show two digits or more of the largest of the values."""
    largest = max(map(abs, values), default=0.0)
    if largest >= 0.1 or largest == 0:
        return 2
    return min(12, 1 - math.floor(math.log10(largest)))


def attention_kind(part: str) -> str:
    """What attends in a part: its name without the numbers of layers, such as "encoder attention"."""
    return " ".join(re.sub(r"(^|\.)\d+(?=\.|$)", "", part).strip(".").split(".")) or "attention"


def head_grids(values: Mapping[str, Sequence[float]], texts: Mapping[str, Sequence[str]]) -> list[HeadGrid]:
    """The grids of the values and texts of the heads of each part, in the order of the parts."""
    parts_by_kind: dict[str, list[str]] = {}
    for part in values:
        parts_by_kind.setdefault(attention_kind(part), []).append(part)
    return [
        HeadGrid(kind, tuple(parts), tuple(tuple(values[p]) for p in parts), tuple(tuple(texts[p]) for p in parts))
        for kind, parts in parts_by_kind.items()
    ]


def grid_rows(grid: HeadGrid) -> list[tuple[str, ...]]:
    """A row of a table for each layer: its name, and value and text of each head."""
    width = max(map(len, grid.values))
    decimals = _decimals(value for row in grid.values for value in row)
    rows = []
    for part, values, texts in zip(grid.parts, grid.values, grid.texts, strict=True):
        cells = [f"{value:.{decimals}f} {text}".rstrip() for value, text in zip(values, texts, strict=True)]
        rows.append((part, *cells, *[""] * (width - len(cells))))
    return rows


def draw_grids(grids: Mapping[str, Sequence[HeadGrid]], path: str | Path) -> None:
    """Draw the grids of each measure in a column, one kind of attention above the other, with one scale per measure.

    A scale begins at 0, or at the smallest value if that is negative. The suffix of `path` decides the format (.png,
    .svg or .pdf). Raises UserError for another one."""
    check_picture(Path(path))
    all_grids = [grid for measure_grids in grids.values() for grid in measure_grids]
    columns = max(len(row) for grid in all_grids for row in grid.values)
    rows = max(len(g.parts) for g in all_grids)
    label_inches = 0.09 * max(len(part) for grid in all_grids for part in grid.parts)
    inches = (columns * CELL_INCHES[0] + label_inches + 1.2, rows * CELL_INCHES[1] + 0.9)
    kinds = max(map(len, grids.values()))
    figure, axes = panels(kinds, len(grids), inches, grid=False)
    for column, (measure, measure_grids) in enumerate(grids.items()):
        measure_axes = axes[column :: len(grids)]
        values = [value for grid in measure_grids for row in grid.values for value in row]
        scale = (min(0.0, *values), max(values, default=0.0) or 1.0)
        for axis, grid in zip(measure_axes, measure_grids):
            _draw_grid(axis, grid, columns, scale, _decimals(values))
            axis.set_title(f"{measure}: {grid.kind}", fontsize=10)
        for axis in measure_axes[len(measure_grids) :]:
            axis.set_axis_off()
        measure_axes[len(measure_grids) - 1].set_xlabel("head")
        figure.colorbar(measure_axes[0].images[0], ax=measure_axes, shrink=0.9, pad=0.01, label=measure)
    write_picture(figure, Path(path))


def _draw_grid(axis: Any, grid: HeadGrid, columns: int, scale: tuple[float, float], decimals: int) -> None:
    padded = [[*row, *[math.nan] * (columns - len(row))] for row in grid.values]
    smallest, largest = scale
    axis.imshow(padded, cmap="Blues", vmin=smallest, vmax=largest, aspect="auto")
    axis.set_yticks(range(len(grid.parts)), grid.parts)
    axis.set_xticks(range(columns))
    axis.tick_params(length=0, labelsize=8)
    for row, (values, texts) in enumerate(zip(grid.values, grid.texts, strict=True)):
        for column, (value, text) in enumerate(zip(values, texts, strict=True)):
            color = "black"
            if value > smallest + 0.6 * (largest - smallest):
                color = "white"
            label = f"{value:.{decimals}f}\n{text}".rstrip()
            axis.text(column, row, label, ha="center", va="center", fontsize=7, color=color)
