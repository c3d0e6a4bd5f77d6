"""The passive and the active T-maze: a cue decides which way to turn at the end of a corridor (Ni et al. 2023)."""

import numpy as np
from numpy.typing import NDArray

from manyformer.environments.array_environment import ArrayEnvironment, Outcome, draw_cells
from manyformer.environments.vector_environment import Array, random_words
from manyformer.spaces import DiscreteActions, VectorSpace
from manyformer.type_aliases import IntArray

RIGHT, UP, LEFT, DOWN = range(4)
_MOVES = np.array([(1, 0), (0, 1), (-1, 0), (0, -1)])


class TMaze(ArrayEnvironment):
    """A corridor that ends in a junction with one goal, above or below, which an oracle at x = 0 shows once.

    Actions are right, up, left, down; a move into a wall changes nothing. An observation is (0, goal) at the first
    visit of x = 0, with a goal of 1 or -1, (0, 0) elsewhere in the corridor and (1, y) at the junction. An episode
    lasts `length` + 2 * `lead` + 1 steps: the shortest path by way of the oracle to the goal just fits. The last step
    earns 1 at the goal; each earlier one costs 1 / (steps - 1) where x is less than the step minus `lead`. A
    memoryless policy has a return of 0.5 at best. Ni, Ma, Eysenbach and Bacon 2023 (arXiv:2307.03864), section 4.
    """

    observations = VectorSpace(2)
    actions = DiscreteActions(4)
    success_return = 0.5
    lead: int
    """The steps from the beginning of an episode to the oracle."""

    def __init__(self, rows: int, *, length: int) -> None:
        self.length = length
        self.junction = length + self.lead
        self.longest: int = length + 2 * self.lead + 1
        super().__init__(rows)

    def _first_state(self, seeds: IntArray) -> dict[str, Array]:
        goals = np.where(random_words(seeds, 0) >> np.uint64(63), 1, -1)
        x = np.full(len(seeds), self.lead)
        y = np.zeros(len(seeds), np.int64)
        # -1 before the oracle is visited, then the step of the first visit
        return {"goal": goals, "x": x, "y": y, "oracle_step": np.where(x == 0, 0, -1)}

    def _advance(self, actions: Array) -> Outcome:
        state = self._state
        x = state["x"] + _MOVES[actions, 0]
        y = state["y"] + _MOVES[actions, 1]
        # the corridor, or the cells above and below the junction
        allowed = ((y == 0) & (x >= 0) & (x <= self.junction)) | ((x == self.junction) & (abs(y) <= 1))
        state["x"], state["y"] = np.where(allowed, x, state["x"]), np.where(allowed, y, state["y"])
        step = self.clock + 1
        first_visit = (state["x"] == 0) & (state["oracle_step"] < 0)
        state["oracle_step"] = np.where(first_visit, step, state["oracle_step"])
        ended = step == self.longest
        late = (state["x"] < step - self.lead).astype(np.float64)
        rewards = np.where(ended, state["y"] == state["goal"], -late / (self.longest - 1))
        return Outcome(rewards.astype(np.float64), ended, np.zeros_like(ended))

    def _observe(self) -> NDArray[np.float32]:
        state = self._state
        at_junction = state["x"] == self.junction
        shown = np.where((state["x"] == 0) & (state["oracle_step"] == self.clock), state["goal"], 0)
        return np.stack([at_junction, np.where(at_junction, state["y"], shown)], axis=1).astype(np.float32)

    def frame(self) -> NDArray[np.uint8]:
        """The maze from above, with the agent and the goal."""
        cells = np.ones((5, self.junction + 3), np.int64)
        cells[2, 1:-1] = cells[1:4, -2] = 0
        cells[2 - self._state["goal"][0], -2] = 3
        cells[2 - self._state["y"][0], 1 + self._state["x"][0]] = 2
        return draw_cells(cells)


class TMazePassive(TMaze):
    """The T-maze whose oracle is at the beginning: a test of memory alone, with an optimum of 1."""

    name = "t-maze-passive"
    lead = 0

    def __init__(self, rows: int, *, length: int = 100) -> None:
        super().__init__(rows, length=length)


class TMazeActive(TMaze):
    """The T-maze whose oracle is a step behind the beginning: nothing but the turn at the end rewards that detour.

    The optimum is 1; without the detour the return is 0.5 at best.
    """

    name = "t-maze-active"
    lead = 1

    def __init__(self, rows: int, *, length: int = 20) -> None:
        super().__init__(rows, length=length)
