"""Simple pictures of environments that have no renderer of their own."""

import numpy as np
from numpy.typing import NDArray

WHITE, INK, MARK, GOAL = (255, 255, 255), (60, 60, 70), (30, 110, 200), (220, 120, 30)
CELL = 16
"""The height and width in pixels of a cell of a map."""
BAR_HEIGHT, BAR_WIDTH, MARGIN = 48, 32, 8

Picture = NDArray[np.uint8]


def blank(height: int, width: int) -> Picture:
    """A white picture."""
    return np.full((height, width, 3), 255, np.uint8)


def draw_bars(values: NDArray[np.floating]) -> Picture:
    """Numbers from -1 to 1 as vertical bars, positive ones above a middle line and negative ones below."""
    picture = blank(2 * (BAR_HEIGHT + MARGIN), len(values) * BAR_WIDTH + 2 * MARGIN)
    middle = BAR_HEIGHT + MARGIN
    for index, value in enumerate(np.clip(values, -1, 1)):
        left, height = MARGIN + index * BAR_WIDTH, round(abs(float(value)) * BAR_HEIGHT)
        top, bottom = (middle - height, middle) if value > 0 else (middle, middle + height)
        picture[top:bottom, left + 4 : left + BAR_WIDTH - 4] = MARK if value > 0 else GOAL
    picture[middle] = INK
    return picture


def draw_cells(cells: NDArray[np.integer], *, max_columns: int = 60) -> Picture:
    """A map (rows, columns) of cells: 0 empty, 1 a wall, 2 the agent, 3 the goal.

    A map of more than `max_columns` columns is cut around the agent.
    """
    agent_column = int(np.argwhere(cells == 2)[0, 1])
    first = min(max(0, agent_column - max_columns // 2), max(0, cells.shape[1] - max_columns))
    colors = np.array([WHITE, INK, MARK, GOAL], np.uint8)
    picture: Picture = colors[cells[:, first : first + max_columns]]
    return picture.repeat(CELL, axis=0).repeat(CELL, axis=1)
