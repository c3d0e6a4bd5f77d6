"""The common part of environments whose state is a few arrays: episodes of all rows begin, end and are restored."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from manyformer.environments.drawings import draw_bars
from manyformer.environments.vector_environment import Array, EnvironmentStep, VectorEnvironment, check_state_array
from manyformer.type_aliases import IntArray

RowMask = NDArray[np.bool_]


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
        self.row_seeds, self.episodes = np.zeros(rows, np.int64), np.zeros(rows, np.int64)
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
