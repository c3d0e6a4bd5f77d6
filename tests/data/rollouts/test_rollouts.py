"""Rollouts equal what one row after the other would have seen, and advantages those of their definition."""

from typing import Any

import numpy as np
import pytest
import torch
from tiny_policy import FADE, TinyPolicy
from torch import Tensor

from manyformer.base.environments import make_environment, row_seeds
from manyformer.base.errors import UserError
from manyformer.data.rollouts import (
    ActingPolicy,
    EpisodeBatch,
    RolloutCollector,
    RolloutSettings,
    gae,
    play_episodes,
    sample_actions,
)
from manyformer.nn.batches.episode_batches import ClippedObjective, RolloutBatch
from manyformer.recipes import build

SETTINGS = RolloutSettings(steps=13, discount=0.9, gae_lambda=0.8, objective=ClippedObjective())


def naive_advantages(
    values: Any, next_values: Any, rewards: Any, terminated: Any, done: Any, discount: float, gae_lambda: float
) -> list[float]:
    """The advantages of one row, by the definition: the sum of discounted errors up to the end of the episode."""
    errors = [
        rewards[t] + (0.0 if terminated[t] else discount * next_values[t]) - values[t] for t in range(len(rewards))
    ]
    advantages = []
    for start in range(len(rewards)):
        total, weight = 0.0, 1.0
        for t in range(start, len(rewards)):
            total += weight * errors[t]
            weight *= discount * gae_lambda
            if done[t]:
                break
        advantages.append(total)
    return advantages


def test_advantages_equal_their_definition() -> None:
    shape = 5, 17
    values, next_values, rewards = torch.randn(3, *shape, dtype=torch.float64)
    terminated = torch.rand(shape) < 0.2
    done = terminated | (torch.rand(shape) < 0.1)
    fast = gae(values, next_values, rewards, terminated, done, 0.9, 0.7)
    for row in range(5):
        naive = naive_advantages(values[row], next_values[row], rewards[row], terminated[row], done[row], 0.9, 0.7)
        torch.testing.assert_close(fast[row], torch.stack([torch.as_tensor(number) for number in naive]))


def memory_values(policy: TinyPolicy, steps: list[list[float]]) -> float:
    """The value after the steps of an episode."""
    total = torch.zeros(policy.size)
    for step in steps:
        total = FADE * total + torch.tensor(step, dtype=torch.float32)
    return float(policy.outputs(total).values.detach())


def naive_row(policy: TinyPolicy, seed: np.ndarray, actions: Tensor, options: dict[str, int]) -> dict[str, list[Any]]:
    """What a row of hidden-velocity-cartpole saw that did these actions, step by step."""
    environment = make_environment("hidden-velocity-cartpole", 1, options)
    seen: dict[str, list[Any]] = {
        name: [] for name in ("values", "next_values", "rewards", "terminated", "done", "segments")
    }
    steps = [[*environment.reset(seed)[0].tolist(), -1.0, 0.0]]
    for action in actions.tolist():
        seen["segments"].append(int(environment.episodes[0]))
        seen["values"].append(memory_values(policy, steps))
        result = environment.step(np.array([action]))
        reward = float(result.rewards[0])
        after = [*result.final_observations[0].tolist(), float(action), reward]
        seen["next_values"].append(memory_values(policy, [*steps, after]))
        seen["rewards"].append(reward)
        seen["terminated"].append(bool(result.terminated[0]))
        seen["done"].append(bool(result.done[0]))
        steps = [[*result.observations[0].tolist(), -1.0, 0.0]] if result.done[0] else [*steps, after]
    return seen


def test_rollouts_equal_what_each_row_saw_alone() -> None:
    options = {"length": 11}
    environment, policy = make_environment("hidden-velocity-cartpole", 4, options), TinyPolicy(2, 2)
    assert isinstance(policy, ActingPolicy)
    collector = RolloutCollector(environment, policy, SETTINGS)
    collector.begin(row_seeds(1, 4))
    rollouts = [collector.collect() for _ in range(3)]
    columns = [name for name in RolloutBatch._fields if isinstance(getattr(rollouts[0], name), torch.Tensor)]
    full = {name: torch.cat([getattr(rollout, name) for rollout in rollouts], 1) for name in columns}
    ends = np.zeros(2)
    for row in range(4):
        seen = naive_row(policy, row_seeds(1, 4)[row : row + 1], full["actions"][row], options)
        assert full["segments"][row].tolist() == seen["segments"]
        torch.testing.assert_close(full["values"][row], torch.tensor(seen["values"]))
        # a rollout ends in the middle of an episode: advantages reach to its end only
        for number, rollout in enumerate(rollouts):
            part = {name: column[13 * number : 13 * number + 13] for name, column in seen.items() if name != "segments"}
            naive = torch.tensor(naive_advantages(**part, discount=0.9, gae_lambda=0.8))
            torch.testing.assert_close(rollout.advantages[row], naive, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(rollout.returns[row], naive + rollout.values[row], rtol=1e-4, atol=1e-5)
        ends += sum(seen["terminated"]), sum(seen["done"]) - sum(seen["terminated"])
    assert ends.min() > 0, "some episodes end by themselves and some by the limit"
    first = full["previous_actions"] == -1
    assert bool((full["previous_rewards"][first] == 0).all())
    starts = torch.diff(full["segments"], dim=1, prepend=torch.full((4, 1), -1)) > 0
    assert torch.equal(first, starts)


def test_scores_are_those_of_the_latest_episodes_that_ended() -> None:
    environment = make_environment("memory-length", 3, {"length": 12})
    collector = RolloutCollector(environment, TinyPolicy(3, 2), SETTINGS)
    collector.begin(row_seeds(0, 3))
    assert collector.scores == {}
    rollout = collector.collect()
    last = rollout.actions[:, -1]
    # all three episodes have 13 steps, and end with their answers
    right = torch.where(rollout.observations[:, 0, 2] > 0, last == 1, last == 0).double()
    expected = {"return": float((2 * right - 1).mean()), "episode_length": 13.0, "success": float(right.mean())}
    assert rollout.log_probs is not None
    expected["entropy"] = -float(rollout.log_probs.numpy().mean())
    returns, values = rollout.returns.numpy(), rollout.values.numpy()
    expected["explained_variance"] = 1 - float(np.var(returns - values) / np.var(returns))
    assert collector.scores == pytest.approx(expected)


@pytest.mark.parametrize(
    ("recipe", "keywords"),
    [("gtrxl", {"depth": 2, "heads": 2, "memory_length": 4}), ("lstm-policy", {"depth": 2})],
)
def test_acting_equals_learning_over_several_rollouts(recipe: str, keywords: dict[str, int]) -> None:
    """Episodes end inside a rollout, at its end and beyond it, and are shorter and longer than the memory."""
    policy: Any = build(recipe, observations=2, actions=2, dim=16, **keywords)
    environment = make_environment("hidden-velocity-cartpole", 5, {"length": 14})
    collector = RolloutCollector(environment, policy, SETTINGS._replace(steps=9))
    collector.begin(row_seeds(0, 5))
    for _ in range(4):
        rollout = collector.collect()
        output = policy(
            *(
                getattr(rollout, name)
                for name in ("observations", "segments", "state", "previous_actions", "previous_rewards")
            )
        )
        log_probs = policy.distribution(output.logits).log_prob(rollout.actions)
        torch.testing.assert_close(log_probs, rollout.log_probs, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(output.values, rollout.values, rtol=1e-5, atol=1e-5)


def test_vectors_of_actions_are_squashed_to_their_bounds() -> None:
    pytest.importorskip("gymnasium")
    environment = make_environment("Pendulum-v1", 3)
    policy = TinyPolicy(3, 1, continuous=True)
    collector = RolloutCollector(environment, policy, SETTINGS)
    collector.begin(row_seeds(0, 3))
    rollout = collector.collect()
    assert rollout.actions.shape == (3, 13, 1)
    torch.testing.assert_close(rollout.previous_actions[:, 1:], rollout.actions[:, :-1].tanh())
    repeated = make_environment("Pendulum-v1", 3)
    repeated.reset(row_seeds(0, 3))
    for step in range(12):
        actions = 2 * rollout.actions[:, step].tanh().numpy()
        np.testing.assert_allclose(repeated.step(actions).rewards, rollout.previous_rewards[:, step + 1], rtol=1e-4)


def test_episodes_are_played_to_their_ends() -> None:
    policy, seeds = TinyPolicy(2, 2), row_seeds(4, 30)
    batch = EpisodeBatch(torch.from_numpy(seeds), lambda rows: make_environment("hidden-velocity-cartpole", rows))
    played = batch.play(policy)
    np.testing.assert_array_equal(played.returns, played.lengths)
    assert played.successes is not None
    assert not played.successes.any()
    assert len(set(played.lengths.tolist())) > 1
    sums = batch.score_sums(policy)
    assert {name: float(value) for name, value in sums.items()} == {
        "return": played.returns.sum(),
        "steps": played.lengths.sum(),
        "episodes": 30,
        "success": 0,
    }
    sampled = play_episodes(make_environment("hidden-velocity-cartpole", 30), policy, seeds, sample_actions)
    assert (sampled.lengths != played.lengths).any()


def test_an_episode_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manyformer.data.rollouts.episode_recording.MAX_STEPS", 20)
    with pytest.raises(UserError, match="an episode of memory-length has not ended after 20 steps; limit it"):
        play_episodes(make_environment("memory-length", 2, {"length": 30}), TinyPolicy(3, 2), row_seeds(0, 2))
