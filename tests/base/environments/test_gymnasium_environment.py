"""Environments of gymnasium: spaces, ends of episodes, restoring by replay, and mistakes."""

import sys
from typing import Any

import numpy as np
import pytest

from manyformer.base.environments import make_environment, row_seeds
from manyformer.base.environments.gymnasium_environment import GymnasiumEnvironment
from manyformer.base.errors import UserError
from manyformer.base.spaces import BoxActions, DiscreteActions, PixelSpace, VectorSpace

gymnasium = pytest.importorskip("gymnasium")


class RandomLengths(gymnasium.Env[Any, Any]):
    """Episodes whose length the seed decides; an observation is the seed's draw and the step."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space: Any = gymnasium.spaces.Discrete(3, start=5)
    fault = ""

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.length, self.drawn, self.t = int(self.np_random.integers(2, 7)), self.np_random.random(), 0
        return self.observe(), {}

    def observe(self) -> Any:
        return np.array([self.drawn, self.t], np.float32)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert action in self.action_space
        self.t += 1
        if self.fault == "raise" and self.t == 2:
            raise RuntimeError("the robot fell over")
        reward = float("nan") if self.fault == "nan" and self.t == 2 else self.drawn * self.t + 0.5 * float(action)
        done = self.t == self.length
        return self.observe(), reward, done and self.length % 2 == 0, done and self.length % 2 == 1, {}


def random_lengths(rows: int) -> GymnasiumEnvironment:
    return GymnasiumEnvironment("random-lengths", RandomLengths, rows)


def test_rows_end_and_begin_in_the_same_step() -> None:
    environment = random_lengths(4)
    observations = environment.reset(row_seeds(0, 4))
    assert environment.actions == DiscreteActions(3)
    ends = np.zeros(2)
    for _ in range(30):
        lengths = [copy.length for copy in environment._copies]
        step = environment.step(np.array([0, 1, 2, 0]))
        np.testing.assert_array_equal(step.final_observations[:, 1], observations[:, 1] + 1)
        np.testing.assert_array_equal(step.final_observations[:, 0], observations[:, 0])
        expected = observations[:, 0] * (observations[:, 1] + 1) + [2.5, 3, 3.5, 2.5]
        np.testing.assert_allclose(step.rewards, expected, rtol=1e-5)
        np.testing.assert_array_equal(step.done, step.final_observations[:, 1] == lengths)
        np.testing.assert_array_equal(step.observations[:, 1], np.where(step.done, 0, step.final_observations[:, 1]))
        np.testing.assert_array_equal(step.terminated[step.done], np.array(lengths)[step.done] % 2 == 0)
        ends += step.terminated.sum(), step.truncated.sum()
        observations = step.observations
    assert ends.min() > 0


def test_an_episode_depends_on_its_row_and_its_number_alone() -> None:
    alone, together = random_lengths(1), random_lengths(3)
    alone.reset(row_seeds(9, 3)[2:])
    together.reset(row_seeds(9, 3))
    for _ in range(25):
        (single, *_), (several, *_) = alone.step(np.zeros(1, int)), together.step(np.zeros(3, int))
        np.testing.assert_array_equal(single[0], several[2])


@pytest.mark.parametrize("name", ["CartPole-v1", "Pendulum-v1"])
def test_running_episodes_are_restored_by_repeating_their_actions(name: str) -> None:
    first, second = make_environment(name, 2), make_environment(name, 2)
    first.reset(row_seeds(2, 2))
    generator = np.random.default_rng(0)

    def actions() -> Any:
        discrete = isinstance(first.actions, DiscreteActions)
        return generator.integers(2, size=2) if discrete else generator.uniform(-2, 2, (2, 1)).astype(np.float32)

    for _ in range(30):
        observations = first.step(actions()).observations
    np.testing.assert_array_equal(second.restore(first.state_arrays()), observations)
    for _ in range(30):
        chosen = actions()
        for left, right in zip(first.step(chosen), second.step(chosen)):
            np.testing.assert_array_equal(left, right)
    saved = first.state_arrays()
    with pytest.raises(ValueError, match="actions is no array of"):
        second.restore({**saved, "actions": saved["actions"][:-1]})
    with pytest.raises(ValueError, match="lengths is no array of"):
        second.restore({**saved, "lengths": saved["lengths"][:1]})


def test_a_replay_that_ends_its_episode_is_refused() -> None:
    environment = random_lengths(1)
    environment.reset(row_seeds(0, 1))
    saved = environment.state_arrays()
    too_long = {**saved, "lengths": np.array([9]), "actions": np.zeros(9, np.int64)}
    with pytest.raises(ValueError, match="the running episode of row 0 ends before its last action is repeated"):
        environment.restore(too_long)


def test_spaces_are_read() -> None:
    cartpole, pendulum = make_environment("CartPole-v1", 1), make_environment("Pendulum-v1", 1)
    assert (cartpole.observations, cartpole.actions) == (VectorSpace(4), DiscreteActions(2))
    assert (cartpole.longest, cartpole.success_return) == (500, 475)
    assert (pendulum.observations, pendulum.actions) == (VectorSpace(3), BoxActions(1, (-2.0,), (2.0,)))


class Pictures(gymnasium.Env[Any, Any]):
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.observation_space = gymnasium.spaces.Box(0, 255, shape, np.uint8)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return self.np_random.integers(256, size=self.observation_space.shape, dtype=np.uint8), {}


@pytest.mark.parametrize(("shape", "channels"), [((6, 5, 3), 3), ((6, 5), 1)])
def test_images_are_observed_as_bytes(shape: tuple[int, ...], channels: int) -> None:
    environment = GymnasiumEnvironment("pictures", lambda: Pictures(shape), 2)
    assert environment.observations == PixelSpace(6, 5, channels)
    observations = environment.reset(row_seeds(0, 2))
    assert observations.shape == (2, 6, 5, channels)
    assert observations.dtype == np.uint8


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("CartPole-v9", {}, r"there is no environment 'CartPole-v9'; did you mean CartPole-v1"),
        ("memory-lenght", {}, r"there is no environment 'memory-lenght'; did you mean memory-length\?"),
        ("qqq", {}, "there is no environment 'qqq'; known: graph-walk, hidden-velocity-cartpole, memory-length, "),
        ("Blackjack-v1", {}, r"Blackjack-v1 has the observations Tuple\(Discrete\(32\), .*; a policy reads vectors"),
        ("CartPole-v1", {"speed": 3}, "the environment CartPole-v1 raised TypeError while it was made: .*'speed'"),
    ],
)
def test_names_options_and_spaces_are_checked(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_environment(name, 1, options)


def test_unbounded_actions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RandomLengths, "action_space", gymnasium.spaces.Box(-np.inf, np.inf, (2,)))
    with pytest.raises(UserError, match=r"random-lengths has the actions Box\(.*; a policy chooses among discrete"):
        random_lengths(1)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("nan", "the environment random-lengths gave the reward nan at step 2 of episode 0 of row 0"),
        ("raise", "raised RuntimeError at step 2 of episode 0 of row 0: the robot fell over"),
    ],
)
def test_faults_of_an_environment_are_named(fault: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RandomLengths, "fault", fault)
    environment = random_lengths(2)
    environment.reset(row_seeds(0, 2))
    environment.step(np.zeros(2, np.int64))
    with pytest.raises(UserError, match=message):
        environment.step(np.zeros(2, np.int64))


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(UserError, match=r"no environment 'CartPole-v1' of our own .*pip install \"manyformer\[rl\]\""):
        make_environment("CartPole-v1", 1)
    assert make_environment("memory-length", 2).rows == 2


def test_environments_are_drawn_where_they_can_be() -> None:
    pytest.importorskip("pygame")
    environment = make_environment("CartPole-v1", 1, drawn=True)
    environment.reset(row_seeds(0, 1))
    assert environment.frame().shape[2] == 3
    environment.close()
    hidden = random_lengths(1)
    with pytest.raises(UserError, match="random-lengths"):
        hidden.frame()
