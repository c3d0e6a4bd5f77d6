"""Walks on a graph: shortest paths from random walks, and a maze whose best path was never walked as a whole."""

from abc import abstractmethod
from typing import final

import numpy as np
from numpy.typing import NDArray

from manyformer.base.environments.vector_environment import Array, ArrayEnvironment, Outcome, random_words
from manyformer.base.spaces import DiscreteActions, VectorSpace
from manyformer.base.type_aliases import IntArray

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
