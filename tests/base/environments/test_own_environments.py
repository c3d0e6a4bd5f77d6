"""Our own tasks equal their one-episode references, have the returns that were published, and can be restored."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from naive_environments import (
    NaiveCartPole,
    NaiveGraph,
    NaiveMemoryLength,
    NaiveRepeatPrevious,
    NaiveTMaze,
)
from numpy.typing import NDArray

from manyformer.base.environments import OWN_ENVIRONMENTS, VectorEnvironment, make_environment, row_seeds
from manyformer.base.environments.memory_tasks import GraphWalk, StitchMaze
from manyformer.base.environments.vector_environment import episode_seeds, random_fractions
from manyformer.base.errors import UserError

Actions = NDArray[np.int64]
SETTINGS: dict[str, dict[str, int]] = {
    "memory-length": {"length": 5},
    "t-maze-passive": {"length": 4},
    "t-maze-active": {"length": 3},
    "repeat-previous": {"lag": 3, "decks": 1},
    "hidden-velocity-cartpole": {"length": 15},
    "graph-walk": {"nodes": 7, "edges": 2, "length": 9},
    "stitch-maze": {"length": 2},
}


def naive_of(environment: Any, row: int) -> Any:
    """The reference with what was drawn for the running episode of a row."""
    drawn = {name: array[row] for name, array in environment.state_arrays().items()}
    match environment.name:
        case "memory-length":
            return NaiveMemoryLength(length=environment.length, context=drawn["context"])
        case "t-maze-passive" | "t-maze-active":
            return NaiveTMaze(length=environment.length, lead=environment.lead, goal=drawn["goal"])
        case "repeat-previous":
            return NaiveRepeatPrevious(lag=environment.lag, suits=drawn["suits"].tolist())
        case "graph-walk" | "stitch-maze":
            tables = {"successors": environment.successors.tolist(), "rewards": environment.step_rewards.tolist()}
            return NaiveGraph(**tables, length=environment.longest, node=int(drawn["node"]))
    return NaiveCartPole(length=environment.longest, motion=drawn["motion"].tolist())


def test_every_own_environment_has_a_reference() -> None:
    assert SETTINGS.keys() == OWN_ENVIRONMENTS.keys()


@pytest.mark.parametrize("name", SETTINGS)
def test_all_rows_equal_the_reference_over_several_episodes(name: str) -> None:
    environment = make_environment(name, 6, SETTINGS[name])
    generator = np.random.default_rng(0)
    observations = environment.reset(row_seeds(1, 6))
    references = [naive_of(environment, row) for row in range(6)]
    ends = {"terminated": 0, "truncated": 0}
    for _ in range(120):
        for row, reference in enumerate(references):
            first = reference.observe(arrived=True) if isinstance(reference, NaiveTMaze) else reference.observe()
            if environment.state_arrays()["clock"][row] == 0:
                np.testing.assert_allclose(observations[row], first, atol=1e-6)
        # mostly to the right, so that mazes are walked through
        actions = np.where(generator.random(6) < 0.5, 0, generator.integers(environment.actions.size, size=6))
        if name == "hidden-velocity-cartpole":
            actions = generator.integers(2, size=6)
        step = environment.step(actions)
        for row, reference in enumerate(references):
            expected = reference.step(int(actions[row]))
            np.testing.assert_allclose(step.final_observations[row], expected.observation, atol=1e-6)
            np.testing.assert_allclose(step.rewards[row], expected.reward, atol=1e-6)
            assert (expected.end == "terminated") == step.terminated[row]
            assert (expected.end == "truncated") == step.truncated[row]
            if expected.end:
                ends[expected.end] += 1
                references[row] = naive_of(environment, row)
        observations = step.observations
    assert ends["terminated"] > 0
    assert name != "hidden-velocity-cartpole" or ends["truncated"] > 0


@pytest.mark.oracle
def test_cartpole_moves_as_that_of_gymnasium() -> None:
    gymnasium = pytest.importorskip("gymnasium")
    own, generator = make_environment("hidden-velocity-cartpole", 1), np.random.default_rng(0)
    own.reset(row_seeds(0, 1))
    oracle = gymnasium.make("CartPole-v1").unwrapped
    oracle.reset(seed=0)
    for _ in range(4):
        oracle.state = own.state_arrays()["motion"][0]
        oracle.steps_beyond_terminated = None
        done = False
        while not done:
            action = int(generator.integers(2))
            full, _, terminated, _, _ = oracle.step(action)
            step = own.step(np.array([action]))
            np.testing.assert_allclose(step.final_observations[0], full[::2], rtol=1e-6)
            assert terminated == step.terminated[0]
            done = terminated


def mean_return(name: str, policy: Callable[[VectorEnvironment, Any], Actions], **options: int) -> float:
    """The mean return of the first episode in 400 rows."""
    environment = make_environment(name, 400, options)
    observations, total, running = environment.reset(row_seeds(3, 400)), np.zeros(400), np.ones(400, bool)
    while running.any():
        step = environment.step(policy(environment, observations))
        total += step.rewards * running
        running &= ~step.done
        observations = step.observations
    return float(total.mean())


class Recall:
    """Remembers the cue that an observation's last number shows, and answers at the end."""

    def __init__(self, act: Callable[[Any, Any], Actions]) -> None:
        self.cue, self.act = np.zeros(400), act

    def __call__(self, environment: VectorEnvironment, observations: Any) -> Actions:
        at_end = observations[:, -2] == 1
        self.cue = np.where(at_end | (observations[:, -1] == 0), self.cue, observations[:, -1])
        return self.act(at_end, self.cue)


def random_actions(environment: VectorEnvironment, observations: Any) -> Actions:
    return np.random.default_rng(int(abs(observations).sum() * 1e6) % 2**31).integers(
        environment.actions.size, size=400
    )


def test_memory_length_has_its_optimum_and_chance() -> None:
    recall = Recall(lambda at_end, cue: (cue > 0).astype(int))
    assert mean_return("memory-length", recall, length=20) == 1
    assert abs(mean_return("memory-length", random_actions, length=20)) < 0.15
    assert abs(mean_return("memory-length", lambda _, x: np.ones(len(x), int), length=20)) < 0.15


def test_passive_t_maze_has_its_optimum_and_that_of_a_memoryless_policy() -> None:
    recall = Recall(lambda at_junction, cue: np.where(at_junction, np.where(cue > 0, 1, 3), 0))
    assert mean_return("t-maze-passive", recall, length=10) == 1
    memoryless = Recall(lambda at_junction, cue: np.where(at_junction, 1, 0))
    assert abs(mean_return("t-maze-passive", memoryless, length=10) - 0.5) < 0.1
    assert mean_return("t-maze-passive", lambda _, x: np.full(len(x), 2), length=10) == pytest.approx(-1, abs=1e-6)


def test_active_t_maze_needs_a_detour() -> None:
    steps = iter([2] + [0] * 40)
    recall = Recall(lambda at_junction, cue: np.where(at_junction, np.where(cue > 0, 1, 3), next(steps)))
    assert mean_return("t-maze-active", recall, length=10) == 1
    direct = Recall(lambda at_junction, cue: np.where(at_junction, 1, 0))
    assert abs(mean_return("t-maze-active", direct, length=10) - 0.5) < 0.1


def test_repeat_previous_asks_for_the_card_one_place_later_than_its_name_says() -> None:
    def deal_back(steps: int) -> float:
        history: list[Any] = []

        def policy(environment: VectorEnvironment, observations: Any) -> Actions:
            history.append(observations.argmax(1))
            return history[max(0, len(history) - 1 - steps)]

        return mean_return("repeat-previous", policy, lag=4)

    assert deal_back(3) == pytest.approx(1, abs=1e-5)
    assert -0.65 < deal_back(4) < -0.4
    assert abs(mean_return("repeat-previous", random_actions, lag=4) + 0.5) < 0.05


@pytest.mark.parametrize("name", SETTINGS)
def test_running_episodes_are_restored_from_their_arrays(name: str) -> None:
    first, second = (make_environment(name, 3, SETTINGS[name]) for _ in range(2))
    first.reset(row_seeds(5, 3))
    generator = np.random.default_rng(0)
    actions = generator.integers(first.actions.size, size=(40, 3))
    for step in actions[:17]:
        observations = first.step(step).observations
    saved = first.state_arrays()
    np.testing.assert_array_equal(second.restore(saved), observations)
    for step in actions[17:]:
        for left, right in zip(first.step(step), second.step(step)):
            np.testing.assert_array_equal(left, right)
    with pytest.raises(ValueError, match=r"clock is no array of int64 with the shape \(3,\)"):
        second.restore({**saved, "clock": saved["clock"][:2]})


def test_rows_and_episodes_are_drawn_independently() -> None:
    seeds = episode_seeds(row_seeds(0, 50)[:, None], np.arange(400))
    assert len(np.unique(seeds)) == seeds.size
    assert seeds.min() >= 0
    assert seeds.max() < 2**31
    fractions = random_fractions(seeds.ravel(), 0)
    assert abs(fractions.mean() - 0.5) < 0.02
    assert abs(np.corrcoef(fractions[:-1], fractions[1:])[0, 1]) < 0.05


@pytest.mark.parametrize("name", SETTINGS)
def test_own_environments_can_be_drawn(name: str) -> None:
    environment = make_environment(name, 2, SETTINGS[name])
    environment.reset(row_seeds(0, 2))
    pictures = [environment.frame()]
    for _ in range(4):
        environment.step(np.zeros(2, np.int64))
        pictures.append(environment.frame())
    assert all(picture.dtype == np.uint8 and picture.shape == pictures[0].shape for picture in pictures)
    assert any((picture != pictures[0]).any() for picture in pictures)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("memory-length", {"lenght": 3}, r"memory-length has no option 'lenght'; did you mean length\?"),
        ("memory-length", {"length": 0}, "memory-length: length is 0, but it is a whole number from 1 to 1,000,000"),
        ("t-maze-passive", {"length": 2.5}, "t-maze-passive: length is 2.5, but it is a whole number"),
        ("repeat-previous", {"lag": 52}, "lag is 52, but 1 decks have 52 cards; it must be less"),
        ("os:path", {}, "the environment 'os:path' names a module; write path, and import: os"),
    ],
)
def test_options_are_checked(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_environment(name, 2, options)


def test_the_shortest_paths_of_the_graph_have_the_optimal_returns() -> None:
    environment = make_environment("graph-walk", 400)
    assert isinstance(environment, GraphWalk)
    optimum = environment.optimal_returns()

    def nearest(environment: VectorEnvironment, observations: Any) -> Actions:
        assert isinstance(environment, GraphWalk)
        distance = np.append(-optimum[::-1], 0)[::-1]
        following = environment.successors[observations.argmax(1)]
        return np.where(following < 0, 0, distance[following]).argmin(1)

    assert optimum.max() == -1
    assert optimum.min() >= -19
    assert mean_return("graph-walk", nearest) == pytest.approx(float(optimum.mean()), abs=0.15)
    walks = mean_return("graph-walk", lambda environment, _: environment.recorded_actions())  # type: ignore[attr-defined]
    assert walks < 4 * optimum.mean()


def test_the_best_path_of_the_maze_is_recorded_in_halves_alone() -> None:
    def second(environment: VectorEnvironment, observations: Any) -> Actions:
        return np.ones(400, np.int64)

    assert mean_return("stitch-maze", second) == 10
    environment = make_environment("stitch-maze", 300)
    assert isinstance(environment, StitchMaze)
    observations = environment.reset(row_seeds(0, 300))
    starts, totals, running = observations.argmax(1), np.zeros(300), np.ones(300, bool)
    while running.any():
        step = environment.step(environment.recorded_actions())
        totals += step.rewards * running
        running &= ~step.done
    ends = {(int(start), float(total)) for start, total in zip(starts, totals)}
    assert ends == {(0, 0.0), (0, 1.0), (environment.second_start, 10.0)}
