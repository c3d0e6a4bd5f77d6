"""Tasks that need a memory: of a bit or a card seen before, of a cue in a maze, of positions for velocities.

A bit is shown once (Osband et al. 2020), the suit of an earlier card is asked for (Morad et al. 2023), a cue decides
which way to turn at the end of a corridor (Ni et al. 2023), and a pole is balanced from positions alone."""

from abc import abstractmethod
from typing import final

import numpy as np
from numpy.typing import NDArray

from manyformer.base.environments.vector_environment import (
    INK,
    MARK,
    Array,
    ArrayEnvironment,
    Outcome,
    blank,
    draw_cells,
    random_fractions,
    random_words,
)
from manyformer.base.errors import UserError
from manyformer.base.spaces import DiscreteActions, VectorSpace
from manyformer.base.type_aliases import IntArray

SUITS = 4
DECK = 52


@final
class MemoryLengthTask(ArrayEnvironment):
    """Shows a random sign at the first step and asks for it `length` steps later: reward 1 if it is named, else -1.

    bsuite's `memory_len` with one bit (Osband et al. 2020, arXiv:1908.03568). An observation is the share of the time
    that is left, 1 at the step of the question, and the sign at the first step (zeros otherwise); only the last of the
    `length` + 1 actions counts, 1 for the positive sign. A memoryless policy has a return of 0 at best.
    """

    name = "memory-length"
    observations = VectorSpace(3)
    actions = DiscreteActions(2)
    success_return = 1.0

    def __init__(self, rows: int, *, length: int = 60) -> None:
        self.length = length
        self.longest = length + 1
        super().__init__(rows)

    def _first_state(self, seeds: IntArray) -> dict[str, Array]:
        # the uppermost bit of 64
        return {"context": (random_words(seeds, 0) >> np.uint64(63)).astype(np.int64)}

    def _advance(self, actions: Array) -> Outcome:
        answered = self.clock == self.length
        # right or wrong at every step, but rewarded only at the last
        right = actions == self._state["context"]
        return Outcome(np.where(answered, np.where(right, 1.0, -1.0), 0.0), answered, np.zeros_like(answered))

    def _observe(self) -> NDArray[np.float32]:
        time_left = 1 - self.clock / self.length
        shown = np.where(self.clock == 0, 2 * self._state["context"] - 1, 0)
        return np.stack([time_left, self.clock == self.length, shown], axis=1).astype(np.float32)


@final
class RepeatPrevious(ArrayEnvironment):
    """Deals shuffled `decks` of 52 cards one by one; the action names the suit dealt `lag` - 1 steps before the latest.

    POPGym's `RepeatPrevious` (Morad et al. 2023, arXiv:2303.01859, appendix): its reward compares the action with the
    card `lag` places from the end before the next card is dealt, so the latest card itself counts as the first place. A
    step is worth 1 over the number of judged steps, positive if right, else negative; steps with fewer than `lag` cards
    are worth 0. An observation is the suit of the latest card as a vector of four. The optimum is 1, chance -0.5.
    """

    name = "repeat-previous"
    observations = VectorSpace(SUITS)
    actions = DiscreteActions(SUITS)

    def __init__(self, rows: int, *, lag: int = 4, decks: int = 1) -> None:
        self.lag = lag
        self.cards = DECK * decks
        if lag >= self.cards:
            raise UserError(f"lag is {lag}, but {decks} decks have {self.cards} cards; it must be less")
        self.longest: int = self.cards - 1
        super().__init__(rows)

    def _first_state(self, seeds: IntArray) -> dict[str, Array]:
        # a shuffle for each row: sorting random words is one
        order = random_words(seeds[:, None], np.arange(self.cards)).argsort(axis=1, kind="stable")
        return {"suits": order % SUITS}

    def _advance(self, actions: Array) -> Outcome:
        places = self.clock - (self.lag - 1)
        expected = self._state["suits"][np.arange(self.rows), np.maximum(places, 0)]
        signs = np.where(actions == expected, 1.0, -1.0)
        ended = self.clock == self.longest - 1
        return Outcome(np.where(places >= 0, signs / (self.cards - self.lag), 0.0), ended, np.zeros_like(ended))

    def _observe(self) -> NDArray[np.float32]:
        latest = self._state["suits"][np.arange(self.rows), self.clock]
        return np.eye(SUITS, dtype=np.float32)[latest]


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
        state["x"] = np.where(allowed, x, state["x"])
        state["y"] = np.where(allowed, y, state["y"])
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


GRAVITY = 9.8
CART_MASS = 1.0
POLE_MASS = 0.1
HALF_POLE = 0.5
FORCE = 10.0
SECONDS = 0.02
MAX_POSITION = 2.4
MAX_ANGLE = 12 * np.pi / 180
FIRST_RANGE = 0.05
"""The largest size of a number of the first state."""
SCALE = 40
"""Pixels for a meter of the picture."""


@final
class HiddenVelocityCartPole(ArrayEnvironment):
    """Balances a pole on a cart by pushing left (0) or right (1); only the position and the angle are observed.

    Physics and limits are those of gymnasium's `CartPole-v1` (Barto, Sutton and Anderson 1983), with a reward of 1 at
    each step and at most `length` steps, at which an episode is truncated; velocities must be remembered from earlier
    positions. The optimum is `length`.
    """

    name = "hidden-velocity-cartpole"
    observations = VectorSpace(2)
    actions = DiscreteActions(2)

    def __init__(self, rows: int, *, length: int = 500) -> None:
        self.longest = length
        # the share of the steps at which CartPole-v1 counts as solved
        self.success_return = 0.95 * length
        super().__init__(rows)

    def _first_state(self, seeds: IntArray) -> dict[str, Array]:
        return {"motion": FIRST_RANGE * (2 * random_fractions(seeds[:, None], np.arange(4)) - 1)}

    def _advance(self, actions: Array) -> Outcome:
        _, speed, angle, spin = self._state["motion"].T
        force = np.where(actions == 1, FORCE, -FORCE)
        sine = np.sin(angle)
        cosine = np.cos(angle)
        # equations of motion as in CartPole-v1 of gymnasium, whose returns are then comparable
        mass = CART_MASS + POLE_MASS
        push = (force + POLE_MASS * HALF_POLE * spin**2 * sine) / mass
        turn = (GRAVITY * sine - cosine * push) / (HALF_POLE * (4 / 3 - POLE_MASS * cosine**2 / mass))
        acceleration = push - POLE_MASS * HALF_POLE * turn * cosine / mass
        derivatives = np.stack([speed, acceleration, spin, turn], axis=1)
        # explicit Euler with the velocities before the step, as in gymnasium
        motion = self._state["motion"] + SECONDS * derivatives
        self._state["motion"] = motion
        terminated = (np.abs(motion[:, 0]) > MAX_POSITION) | (np.abs(motion[:, 2]) > MAX_ANGLE)
        truncated = (self.clock + 1 == self.longest) & ~terminated
        return Outcome(np.ones(self.rows), terminated, truncated)

    def _observe(self) -> NDArray[np.float32]:
        return self._state["motion"][:, ::2].astype(np.float32)

    def frame(self) -> NDArray[np.uint8]:
        """The cart on its track with the pole."""
        picture = blank(120, round(2 * MAX_POSITION * SCALE) + 40)
        x, _, angle, _ = self._state["motion"][0]
        column = round((x + MAX_POSITION) * SCALE) + 20
        picture[100] = INK
        picture[90:100, max(0, column - 15) : column + 15] = INK
        # the pole, drawn half as long again as it is, as a row of points
        along = np.linspace(0, 2 * HALF_POLE * SCALE * 1.5, 200)
        rows = (90 - along * np.cos(angle)).astype(int)
        columns = (column + along * np.sin(angle)).astype(int)
        inside = (columns > 0) & (columns < picture.shape[1] - 2)
        for offset in (0, 1):
            picture[rows[inside], columns[inside] + offset] = MARK
        return picture


GRAPH_SEED = np.array([2106])
"""Decides the edges of the random graph: it is the same one for all runs."""
END = -1
"""The successor of a node by an action that ends the episode."""
WALK_COUNTER = 1 << 20
"""The first counter of the random actions of an episode, beyond those of its first state."""


class GraphTask(ArrayEnvironment):
    """A walk on `successors` (nodes, actions), where a step has the reward at the same place of `step_rewards`.

    An observation is the node as a one-hot vector. After `longest` steps an episode is cut off."""

    successors: IntArray
    step_rewards: NDArray[np.float32]
    longest: int

    def __init__(self, rows: int, successors: IntArray, step_rewards: NDArray[np.float32], longest: int) -> None:
        self.successors = successors
        self.step_rewards = step_rewards
        self.longest = longest
        self.observations = VectorSpace(len(successors))
        self.actions = DiscreteActions(successors.shape[1])
        super().__init__(rows)

    @abstractmethod
    def recorded_actions(self) -> IntArray:
        """The next actions of the behavior that recorded episodes of this task come from."""

    def _advance(self, actions: Array) -> Outcome:
        node = self._state["node"]
        rewards = self.step_rewards[node, actions]
        following = self.successors[node, actions]
        ended = following == END
        # an ended row shows the node that it left, because the goal has no observation
        self._state["node"] = np.where(ended, node, following)
        return Outcome(rewards, ended, ~ended & (self.clock + 1 >= self.longest))

    def _observe(self) -> NDArray[np.float32]:
        return np.eye(len(self.successors), dtype=np.float32)[self._state["node"]]


@final
class GraphWalk(GraphTask):
    """Walks from a random node of a random graph to node 0; each step is worth -1 (Chen et al. 2021, figure 2).

    Every one of `nodes` has `edges`: to the next node, so that all can reach the goal, and to random ones. Recorded
    episodes are random walks. The optimum is minus the length of the shortest path, `optimal_returns`."""

    name = "graph-walk"

    def __init__(self, rows: int, *, nodes: int = 20, edges: int = 4, length: int = 20) -> None:
        counters = np.arange(nodes * edges).reshape(nodes, edges)
        successors = (random_words(GRAPH_SEED, counters.ravel()) % np.uint64(nodes)).astype(np.int64)
        successors = successors.reshape(nodes, edges)
        # a ring through all nodes, so that every one can reach the goal
        successors[:, 0] = (np.arange(nodes) + 1) % nodes
        # the goal is no node to be in: reaching it ends the episode
        successors = np.where(successors == 0, END, successors)
        super().__init__(rows, successors, np.full(successors.shape, -1.0, np.float32), length)

    def recorded_actions(self) -> IntArray:
        bits = random_words(self.running_seeds, WALK_COUNTER + self.clock)
        return (bits % np.uint64(self.actions.size)).astype(np.int64)

    def optimal_returns(self) -> NDArray[np.float32]:
        """The return of the shortest path from each node but the goal."""
        steps = np.full(len(self.successors), np.inf)
        # Bellman's recursion; no shortest path has more steps than there are nodes
        for _ in steps:
            following = np.where(self.successors == END, 0.0, steps[self.successors])
            steps = 1 + following.min(1)
        return -steps[1:].astype(np.float32)

    def _first_state(self, seeds: IntArray) -> dict[str, Array]:
        nodes = np.uint64(len(self.successors) - 1)
        return {"node": (random_words(seeds, 0) % nodes).astype(np.int64) + 1}


@final
class StitchMaze(GraphTask):
    """A maze whose best path is in the recorded episodes only as halves of two: its first and its second corridor.

    From node 0 the first action ends the episode with 1, the second leads through a corridor to a junction; there the
    first action ends it with 0, the second with 10. Other episodes begin in a second corridor to the junction. Recorded
    are, as often as each other: node 0 to the end with 1, node 0 over the junction to the end with 0, and the second
    corridor to the end with 10. The optimum is 10 from everywhere. Without learning values (Brandfonbrener et al. 2022,
    arXiv:2206.01079, section 3), a model that is asked for 10 at node 0 has no example of it. Corridors have `length`
    nodes."""

    name = "stitch-maze"

    def __init__(self, rows: int, *, length: int = 3) -> None:
        # node 0, its corridor, the second corridor, the junction
        self.junction = 1 + 2 * length
        self.second_start = 1 + length
        # in corridors both actions lead on
        successors = np.repeat(np.arange(1, self.junction + 2)[:, None], 2, axis=1)
        successors[0, 0] = END
        successors[length] = self.junction
        successors[self.junction] = END
        rewards = np.zeros(successors.shape, np.float32)
        rewards[0, 0] = 1.0
        rewards[self.junction, 1] = 10.0
        super().__init__(rows, successors, rewards, length + 2)

    def recorded_actions(self) -> IntArray:
        kinds = random_words(self.running_seeds, 0) % np.uint64(3)
        node = self._state["node"]
        to_best = (node == self.junction) & (kinds == 2)
        actions: IntArray = ((node == 0) & (kinds == 1) | to_best).astype(np.int64)
        return actions

    def _first_state(self, seeds: IntArray) -> dict[str, Array]:
        return {"node": np.where(random_words(seeds, 0) % np.uint64(3) == 2, self.second_start, 0)}
