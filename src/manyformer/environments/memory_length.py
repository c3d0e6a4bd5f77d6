"""Memory length: a bit is shown once, and must be named after many steps (Osband et al. 2020, bsuite)."""

from typing import final

import numpy as np
from numpy.typing import NDArray

from manyformer.environments.array_environment import ArrayEnvironment, Outcome
from manyformer.environments.drawings import draw_bars
from manyformer.environments.episode_seeds import random_words
from manyformer.environments.vector_environment import Array
from manyformer.spaces import DiscreteActions, VectorSpace
from manyformer.type_aliases import IntArray


@final
class MemoryLengthTask(ArrayEnvironment):
    """Shows a random sign at the first step and asks for it `length` steps later: reward 1 if it is named, else -1.

    bsuite's `memory_len` with one bit (Osband et al. 2020, arXiv:1908.03568). An observation is the share of the time
    that is left, 1 at the step of the question, and the sign at the first step (zeros otherwise); only the last of the
    `length` + 1 actions counts, 1 for the positive sign. A memoryless policy has a return of 0 at best.
    """

    name = "memory-length"
    observations, actions = VectorSpace(3), DiscreteActions(2)
    success_return = 1.0

    def __init__(self, rows: int, *, length: int = 60) -> None:
        self.length = length
        self.longest = length + 1
        super().__init__(rows)

    def _first_state(self, seeds: IntArray) -> dict[str, Array]:
        return {"context": (random_words(seeds, 0) >> np.uint64(63)).astype(np.int64)}

    def _advance(self, actions: Array) -> Outcome:
        answered = self.clock == self.length
        right = actions == self._state["context"]
        return Outcome(np.where(answered, np.where(right, 1.0, -1.0), 0.0), answered, np.zeros_like(answered))

    def _observe(self) -> NDArray[np.float32]:
        time_left = 1 - self.clock / self.length
        shown = np.where(self.clock == 0, 2 * self._state["context"] - 1, 0)
        return np.stack([time_left, self.clock == self.length, shown], axis=1).astype(np.float32)

    def frame(self) -> NDArray[np.uint8]:
        """The three numbers of the observation as bars."""
        return draw_bars(self._observe()[0])
