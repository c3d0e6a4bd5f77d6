"""Recorded episodes are whole, and repeat what the environment did."""

import numpy as np
import pytest

from manyformer.base.environments import make_environment, row_seeds
from manyformer.data.rollouts import sample_actions
from manyformer.data.rollouts.episode_recording import RandomPolicy, join_trajectories, record_episodes


def test_a_recording_is_what_the_environment_answers() -> None:
    environment = make_environment("hidden-velocity-cartpole", 5, {"length": 25})
    seeds = row_seeds(2, 5)
    recorded = record_episodes(environment, RandomPolicy(environment.actions), seeds, sample_actions, source="random")
    assert recorded.lengths.sum() == len(recorded.rewards) == len(recorded.actions)
    assert recorded.source.tolist() == ["random"] * 5
    start = 0
    for row, length in enumerate(recorded.lengths):
        repeated = make_environment("hidden-velocity-cartpole", 1, {"length": 25})
        observations = repeated.reset(seeds[row : row + 1])
        for index in range(start, start + length):
            np.testing.assert_array_equal(recorded.observations[index], observations[0])
            result = repeated.step(recorded.actions[index : index + 1])
            assert recorded.rewards[index] == result.rewards[0]
            assert recorded.terminations[index] == result.terminated[0]
            assert recorded.truncations[index] == result.truncated[0]
            observations = result.observations
        assert recorded.terminations[index] != recorded.truncations[index]
        np.testing.assert_array_equal(recorded.final_observations[row], result.final_observations[0])
        start += length
    assert len(set(recorded.lengths.tolist())) > 1
    both = join_trajectories([recorded, recorded._replace(source=np.full(5, "a longer name"))])
    assert both.source.tolist() == ["random"] * 5 + ["a longer name"] * 5
    assert both.episode_returns.tolist() == [*recorded.lengths, *recorded.lengths]


def test_random_vectors_are_uniform_within_their_bounds() -> None:
    pytest.importorskip("gymnasium")
    environment = make_environment("Pendulum-v1", 20)
    policy = RandomPolicy(environment.actions)
    recorded = record_episodes(environment, policy, row_seeds(0, 20), sample_actions, source="random")
    assert recorded.actions.shape == (4000, 1)
    assert recorded.actions.dtype == np.float32
    counts, _ = np.histogram(recorded.actions, bins=10, range=(-2, 2))
    assert counts.sum() == 4000
    assert counts.min() > 320
