"""The common part of environments whose state is a few arrays: how episodes begin, end, are restored and drawn."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from manyformer.environments.vector_environment import Array, EnvironmentStep, VectorEnvironment, check_state_array
from manyformer.type_aliases import IntArray

RowMask = NDArray[np.bool_]

WHITE = (255, 255, 255)
INK = (60, 60, 70)
MARK = (30, 110, 200)
GOAL = (220, 120, 30)
CELL = 16
"""The height and width in pixels of a cell of a map."""
BAR_HEIGHT = 48
BAR_WIDTH = 32
MARGIN = 8

Picture = NDArray[np.uint8]


class Outcome(NamedTuple):
    """Rewards and ends of one step, before rows whose episode has ended begin the next one."""

    rewards: NDArray[np.floating]
    terminated: RowMask
    truncated: RowMask


class ArrayEnvironment(VectorEnvironment):
    """An environment whose state are the arrays of `_state`, with one row each, and the `clock` of each episode.

    A subclass defines the first values of a state array for new episodes, the effect of actions, and what is observed.
    """

    clock: IntArray
    """The number of steps since the beginning of each row's episode."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.row_seeds = np.zeros(rows, np.int64)
        self.episodes = np.zeros(rows, np.int64)
        self.clock = np.zeros(rows, np.int64)
        self._state = self._first_state(self.running_seeds)

    def step(self, actions: Array) -> EnvironmentStep:
        rewards, terminated, truncated = self._advance(actions)
        self.clock += 1
        final_observations = observations = self._observe()
        if (done := terminated | truncated).any():
            self.episodes = self.episodes + done
            self.clock[done] = 0
            for name, values in self._first_state(self.running_seeds[done]).items():
                self._state[name][done] = values
            observations = self._observe()
        return EnvironmentStep(observations, rewards.astype(np.float32), terminated, truncated, final_observations)

    def state_arrays(self) -> dict[str, Array]:
        arrays = {"row_seeds": self.row_seeds, "episodes": self.episodes, "clock": self.clock, **self._state}
        return {name: array.copy() for name, array in arrays.items()}

    def restore(self, arrays: Mapping[str, Array]) -> Array:
        checked = {name: check_state_array(arrays, name, array) for name, array in self.state_arrays().items()}
        self.row_seeds, self.episodes, self.clock = (checked.pop(name) for name in ("row_seeds", "episodes", "clock"))
        self._state = checked
        return self._observe()

    def frame(self) -> NDArray[np.uint8]:
        """The numbers of the observation as bars."""
        return draw_bars(self._observe()[0])

    def _begin_all(self) -> Array:
        self.clock = np.zeros(self.rows, np.int64)
        self._state = self._first_state(self.running_seeds)
        return self._observe()

    @abstractmethod
    def _first_state(self, seeds: IntArray) -> dict[str, Array]:
        """The state of episodes that begin, from their seeds; every array has as many rows as there are seeds."""

    @abstractmethod
    def _advance(self, actions: Array) -> Outcome:
        """Change the state of all rows by their actions; the clock does not yet count this step."""

    @abstractmethod
    def _observe(self) -> NDArray[np.float32]:
        """The current observations of all rows, as a new array."""


def blank(height: int, width: int) -> Picture:
    """A white picture."""
    return np.full((height, width, 3), 255, np.uint8)


def draw_bars(values: NDArray[np.floating]) -> Picture:
    """Numbers from -1 to 1 as vertical bars, positive ones above a middle line and negative ones below."""
    picture = blank(2 * (BAR_HEIGHT + MARGIN), len(values) * BAR_WIDTH + 2 * MARGIN)
    middle = BAR_HEIGHT + MARGIN
    for index, value in enumerate(np.clip(values, -1, 1)):
        left = MARGIN + index * BAR_WIDTH
        height = round(abs(float(value)) * BAR_HEIGHT)
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
