"""Measures of heads as grids of layers by heads, one for each kind of attention, as tables and as a picture."""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from manyformer.view.figures import check_picture, panels, write_picture

CELL_INCHES = (0.95, 0.5)
"""The size of a head in a picture."""


class HeadGrid(NamedTuple):
    """A measure of each head of the layers with one kind of attention, and a text for each head."""

    kind: str
    parts: tuple[str, ...]
    values: tuple[tuple[float, ...], ...]
    texts: tuple[tuple[str, ...], ...]


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
    rows = []
    for part, values, texts in zip(grid.parts, grid.values, grid.texts, strict=True):
        cells = [f"{value:.2f} {text}".rstrip() for value, text in zip(values, texts, strict=True)]
        rows.append((part, *cells, *[""] * (width - len(cells))))
    return rows


def draw_grids(grids: Sequence[HeadGrid], path: str | Path, *, measure: str) -> None:
    """Draw the grids one above the other on the scale 0 to 1, or to the largest value if that is above 1.

    The suffix of `path` decides the format (.png, .svg or .pdf). Raises UserError for another one."""
    check_picture(Path(path))
    columns = max(len(row) for grid in grids for row in grid.values)
    rows = max(len(grid.parts) for grid in grids)
    label_inches = 0.09 * max(len(part) for grid in grids for part in grid.parts)
    inches = (columns * CELL_INCHES[0] + label_inches + 1.2, rows * CELL_INCHES[1] + 0.9)
    figure, axes = panels(len(grids), 1, inches, grid=False)
    largest = max([1.0, *(value for grid in grids for row in grid.values for value in row if not math.isnan(value))])
    for axis, grid in zip(axes, grids, strict=True):
        padded = [[*row, *[math.nan] * (columns - len(row))] for row in grid.values]
        axis.imshow(padded, cmap="Blues", vmin=0, vmax=largest, aspect="auto")
        axis.set_yticks(range(len(grid.parts)), grid.parts)
        axis.set_xticks(range(columns))
        axis.tick_params(length=0, labelsize=8)
        axis.set_title(grid.kind, fontsize=10)
        for row, (values, texts) in enumerate(zip(grid.values, grid.texts, strict=True)):
            for column, (value, text) in enumerate(zip(values, texts, strict=True)):
                color = "white" if value > 0.6 * largest else "black"
                label = f"{value:.2f}\n{text}".rstrip()
                axis.text(column, row, label, ha="center", va="center", fontsize=7, color=color)
    axes[-1].set_xlabel("head")
    figure.colorbar(axes[0].images[0], ax=axes, shrink=0.9, pad=0.01, label=measure)
    write_picture(figure, Path(path))
