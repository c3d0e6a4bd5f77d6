"""The interface of environments: many episodes side by side, each in a row of the arrays.

`ArrayEnvironment` is the common part of our own tasks, whose state is a few arrays: how episodes begin, end, are
restored and drawn. Random numbers are a function of a seed and a counter, so that every episode can be repeated on its
own."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from manyformer.base.spaces import ActionSpace, ObservationSpace
from manyformer.base.type_aliases import FloatArray, IntArray

Array = NDArray[Any]
Bits = NDArray[np.uint64]
"""Random bits, 64 for each element."""

Picture = NDArray[np.uint8]
WHITE = (255, 255, 255)
INK = (60, 60, 70)
MARK = (30, 110, 200)
GOAL = (220, 120, 30)
CELL = 16
"""The height and width in pixels of a cell of a map."""

BAR_HEIGHT = 48
BAR_WIDTH = 32
MARGIN = 8
RowMask = NDArray[np.bool_]


class Outcome(NamedTuple):
    """Rewards and ends of one step, before rows whose episode has ended begin the next one."""

    rewards: NDArray[np.floating]
    terminated: RowMask
    truncated: RowMask


class EnvironmentStep(NamedTuple):
    """The result of one step of all rows.

    Where an episode has ended, `observations` are already the first ones of the row's next episode, and
    `final_observations` the last ones of the episode that has ended; elsewhere both are equal. An episode ends by its
    own rules (`terminated`) or only by a limit of time (`truncated`), after which more rewards would have followed.
    """

    observations: Array
    rewards: NDArray[np.float32]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    final_observations: Array

    @property
    def done(self) -> NDArray[np.bool_]:
        """Whether an episode has ended, for each row."""
        return self.terminated | self.truncated


class VectorEnvironment(ABC):
    """`rows` copies of an environment that are stepped together.

    Every episode is determined by its own seed and its actions, so that a running episode can be restored. A row whose
    episode ends begins the next one in the same step.
    """

    name: str
    observations: ObservationSpace
    actions: ActionSpace
    rows: int
    longest: int | None = None
    """The steps after which every episode has ended; None if there is no such limit."""
    success_return: float | None = None
    """The return from which on an episode counts as a success; None where there is no such return."""
    row_seeds: IntArray
    episodes: IntArray
    """The number of the running episode of each row, counted from 0."""

    def reset(self, seeds: IntArray) -> Array:
        """Begin episode 0 of every row; `seeds` (rows,) decide all episodes that follow. Returns the observations."""
        assert seeds.shape == (self.rows,)
        self.row_seeds = seeds.copy()
        self.episodes = np.zeros(self.rows, np.int64)
        return self._begin_all()

    @property
    def running_seeds(self) -> IntArray:
        """The seeds of the running episodes."""
        return episode_seeds(self.row_seeds, self.episodes)

    @abstractmethod
    def step(self, actions: Array) -> EnvironmentStep:
        """Make one step with `actions`, (rows,) integers or (rows, size) numbers within their bounds."""

    @abstractmethod
    def state_arrays(self) -> dict[str, Array]:
        """Arrays from which `restore` can continue the running episodes."""

    @abstractmethod
    def restore(self, arrays: Mapping[str, Array]) -> Array:
        """Continue the episodes of `state_arrays`, and return their current observations.

        Raises ValueError for arrays that are not those of such an environment.
        """

    @abstractmethod
    def frame(self) -> NDArray[np.uint8]:
        """A picture (height, width, 3) of row 0. Raises UserError where the environment cannot be drawn."""

    def close(self) -> None:  # noqa: B027 - most environments hold nothing
        """Release what the environment holds outside of Python's memory."""

    @abstractmethod
    def _begin_all(self) -> Array:
        """Begin the running episode of every row, and return the observations."""


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
        # `_advance` must not count the step itself: `clock` still is the number of steps before it
        rewards, terminated, truncated = self._advance(actions)
        self.clock += 1
        # observed before rows begin again: the value of a truncated episode is that of what it ended with
        final_observations = self._observe()
        observations = final_observations
        if (done := terminated | truncated).any():
            self.episodes = self.episodes + done
            self.clock[done] = 0
            # only the rows that begin again are computed anew: others go on
            for name, values in self._first_state(self.running_seeds[done]).items():
                self._state[name][done] = values
            observations = self._observe()
        return EnvironmentStep(observations, rewards.astype(np.float32), terminated, truncated, final_observations)

    def state_arrays(self) -> dict[str, Array]:
        arrays = {"row_seeds": self.row_seeds, "episodes": self.episodes, "clock": self.clock, **self._state}
        return {name: array.copy() for name, array in arrays.items()}

    def restore(self, arrays: Mapping[str, Array]) -> Array:
        # the arrays of this environment, whatever they hold now, have the shapes and types to expect
        checked = {name: check_state_array(arrays, name, array) for name, array in self.state_arrays().items()}
        self.row_seeds = checked.pop("row_seeds")
        self.episodes = checked.pop("episodes")
        self.clock = checked.pop("clock")
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


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST_FACTOR = np.uint64(0xBF58476D1CE4E5B9)
_SECOND_FACTOR = np.uint64(0x94D049BB133111EB)
_SEED_MASK = np.uint64((1 << 31) - 1)


def check_state_array(arrays: Mapping[str, Array], name: str, like: Array) -> Array:
    """The array of this name, with the shape and type of `like`. Raises ValueError."""
    array = arrays.get(name)
    if array is None or array.shape != like.shape or array.dtype != like.dtype:
        raise ValueError(f"{name} is no array of {like.dtype} with the shape {like.shape}")
    return array


def random_words(seeds: IntArray, counters: IntArray | int) -> Bits:
    """Random bits for each pair of a seed and a counter; both broadcast.

    The function is the finalizer of SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number
    generators", section 5) applied to each counter."""
    # products are meant modulo 2^64
    with np.errstate(over="ignore"):
        bits = _finalize(seeds.astype(np.uint64) + _GOLDEN)
        return _finalize(bits + _GOLDEN * np.asarray(counters).astype(np.uint64))


def random_fractions(seeds: IntArray, counters: IntArray | int) -> FloatArray:
    """Random numbers, uniform from 0 up to 1, for each pair of a seed and a counter."""
    # the 53 upper bits: as many as a float64 between 0 and 1 has
    fractions: FloatArray = (random_words(seeds, counters) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return fractions


def episode_seeds(row_seeds: IntArray, episodes: IntArray | int) -> IntArray:
    """The seed, below 2^31, of each row's episode with this number."""
    # gymnasium takes no larger seeds
    return (random_words(row_seeds, episodes) & _SEED_MASK).astype(np.int64)


def row_seeds(seed: int, rows: int) -> IntArray:
    """The seeds of all rows of an environment, for a run with this seed."""
    return (random_words(np.full(rows, seed), np.arange(rows)) >> np.uint64(1)).astype(np.int64)


def _finalize(bits: Bits) -> Bits:
    bits = (bits ^ (bits >> np.uint64(30))) * _FIRST_FACTOR
    bits = (bits ^ (bits >> np.uint64(27))) * _SECOND_FACTOR
    return bits ^ (bits >> np.uint64(31))


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
        columns = slice(left + 4, left + BAR_WIDTH - 4)
        if value > 0:
            picture[middle - height : middle, columns] = MARK
        else:
            picture[middle : middle + height, columns] = GOAL
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
