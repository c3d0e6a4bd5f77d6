"""Any environment of gymnasium as rows of a vectorized one, each episode with a seed of its own."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, final

import numpy as np
from numpy.typing import NDArray

from manyformer.base.environments.vector_environment import Array, EnvironmentStep, VectorEnvironment, check_state_array
from manyformer.base.errors import UserError
from manyformer.base.spaces import ActionSpace, BoxActions, DiscreteActions, ObservationSpace, PixelSpace, VectorSpace

if TYPE_CHECKING:
    import gymnasium

MAX_REPLAYED_STEPS = 1 << 24
"""The longest episode of which a checkpoint is read, in steps."""


@final
class GymnasiumEnvironment(VectorEnvironment):
    """Copies of one gymnasium environment that are stepped one after the other.

    `make` creates a copy. Running episodes are restored by their seeds and by repeating their actions, which an
    environment that is determined by its seed answers as before. Raises UserError for spaces that are neither vectors
    nor images, neither discrete nor bounded.
    """

    def __init__(self, name: str, make: Callable[[], "gymnasium.Env[Any, Any]"], rows: int) -> None:
        self.name = name
        self.rows = rows
        # the code of an environment is not ours, and may raise anything
        with self._reported("while it was made"):
            self._copies = [make() for _ in range(rows)]
        first = self._copies[0]
        self.observations = _observation_space(name, first.observation_space)
        self.actions = _action_space(name, first.action_space)
        # gymnasium may number discrete actions from another number than 0
        self._first_action = int(getattr(first.action_space, "start", 0))
        spec = first.spec
        self.longest = None if spec is None else spec.max_episode_steps
        self.success_return = None if spec is None else spec.reward_threshold
        self.row_seeds = np.zeros(rows, np.int64)
        self.episodes = np.zeros(rows, np.int64)
        self._history: list[list[Array]] = [[] for _ in range(rows)]
        """The actions of the running episode of each row."""

    def step(self, actions: Array) -> EnvironmentStep:
        results = [self._step_row(row, action) for row, action in enumerate(actions)]
        final_observations, rewards, terminated, truncated = (list(column) for column in zip(*results, strict=True))
        observations = list(final_observations)
        for row in range(self.rows):
            if terminated[row] or truncated[row]:
                self.episodes[row] += 1
                observations[row] = self._begin(row)
        ends = np.array([terminated, truncated], dtype=bool)
        return EnvironmentStep(
            np.stack(observations), np.array(rewards, np.float32), ends[0], ends[1], np.stack(final_observations)
        )

    def state_arrays(self) -> dict[str, Array]:
        lengths = np.array([len(actions) for actions in self._history], np.int64)
        actions = [action for history in self._history for action in history]
        stacked = np.stack(actions) if actions else self._no_actions()
        return {"row_seeds": self.row_seeds, "episodes": self.episodes, "lengths": lengths, "actions": stacked}

    def restore(self, arrays: Mapping[str, Array]) -> Array:
        self.row_seeds = check_state_array(arrays, "row_seeds", self.row_seeds).copy()
        self.episodes = check_state_array(arrays, "episodes", self.episodes).copy()
        lengths = check_state_array(arrays, "lengths", self.row_seeds)
        # a damaged file may hold any numbers, and their sum decides how much is allocated
        if lengths.min() >= 0 and lengths.max() <= MAX_REPLAYED_STEPS:
            total = int(lengths.sum())
        else:
            total = -1
        no_actions = self._no_actions()
        actions = check_state_array(
            arrays, "actions", np.empty((max(0, total), *no_actions.shape[1:]), no_actions.dtype)
        )
        observations = self._begin_all()
        for row, history in enumerate(np.split(actions, np.cumsum(lengths)[:-1])):
            for action in history:
                # repeated, because gymnasium has no way to save the state of an environment
                observations[row], _, terminated, truncated = self._step_row(row, action)
                if terminated or truncated:
                    raise ValueError(f"the running episode of row {row} ends before its last action is repeated")
        return observations

    def frame(self) -> NDArray[np.uint8]:
        """What the environment renders for row 0."""
        with self._reported("while it was drawn"):
            picture = self._copies[0].render()
        if not isinstance(picture, np.ndarray) or picture.dtype != np.uint8 or picture.ndim != 3:
            raise UserError(f"the environment {self.name} cannot be drawn: it has no render mode rgb_array")
        return picture

    def close(self) -> None:
        for copy in self._copies:
            copy.close()

    def _begin_all(self) -> Array:
        return np.stack([self._begin(row) for row in range(self.rows)])

    def _begin(self, row: int) -> Array:
        self._history[row] = []
        with self._reported(f"at the beginning of episode {self.episodes[row]} of row {row}"):
            observation, _ = self._copies[row].reset(seed=int(self.running_seeds[row]))
        return self._checked_observation(observation, row)

    def _step_row(self, row: int, action: Array) -> tuple[Array, float, bool, bool]:
        # a copy: the caller may reuse its array of actions
        self._history[row].append(action.copy())
        converted = action if action.ndim else int(action) + self._first_action
        with self._reported(self._place(row)):
            observation, reward, terminated, truncated, _ = self._copies[row].step(converted)
        number = float(reward)
        if not math.isfinite(number):
            raise UserError(f"the environment {self.name} gave the reward {number} {self._place(row)}")
        return self._checked_observation(observation, row), number, bool(terminated), bool(truncated)

    def _checked_observation(self, observation: Any, row: int) -> Array:
        if isinstance(self.observations, PixelSpace):
            # gray images of two dimensions get one channel
            return np.asarray(observation, np.uint8).reshape(self.observations.shape)
        vector = np.asarray(observation, np.float32)
        if not np.isfinite(vector).all():
            raise UserError(f"the environment {self.name} gave an observation that is not finite {self._place(row)}")
        return vector

    def _place(self, row: int) -> str:
        return f"at step {len(self._history[row])} of episode {self.episodes[row]} of row {row}"

    def _no_actions(self) -> Array:
        if isinstance(self.actions, DiscreteActions):
            return np.empty(0, np.int64)
        return np.empty((0, self.actions.size), np.float32)

    @contextmanager
    def _reported(self, place: str) -> Iterator[None]:
        """Turn whatever the environment raises into a sentence with the place where it was raised."""
        try:
            yield
        except UserError:
            raise
        except Exception as error:
            raise UserError(f"the environment {self.name} raised {type(error).__name__} {place}: {error}") from error


def _observation_space(name: str, space: Any) -> ObservationSpace:
    from gymnasium.spaces import Box

    if isinstance(space, Box) and space.dtype == np.uint8 and len(space.shape) in (2, 3):
        height, width, *channels = space.shape
        return PixelSpace(height, width, *(channels or [1]))
    if isinstance(space, Box) and len(space.shape) == 1:
        return VectorSpace(space.shape[0])
    remedy = "a policy reads vectors (a Box of one dimension) or images (a Box of bytes, height x width x channels)"
    raise UserError(f"the environment {name} has the observations {_shorten(space)}; {remedy}")


def _action_space(name: str, space: Any) -> ActionSpace:
    from gymnasium.spaces import Box, Discrete

    if isinstance(space, Discrete):
        return DiscreteActions(int(space.n))
    if isinstance(space, Box) and len(space.shape) == 1 and np.isfinite([space.low, space.high]).all():
        return BoxActions(space.shape[0], _numbers(space.low), _numbers(space.high))
    remedy = "a policy chooses among discrete actions, or a vector of numbers with finite bounds"
    raise UserError(f"the environment {name} has the actions {_shorten(space)}; {remedy}")


def _numbers(values: Array) -> tuple[float, ...]:
    return tuple(float(value) for value in values)


def _shorten(space: object) -> str:
    text = " ".join(str(space).split())
    if len(text) <= 80:
        return text
    return f"{text[:77]}..."
