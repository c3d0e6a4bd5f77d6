"""Collects rollouts: a fixed number of steps of all rows of an environment, with advantages and returns."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from manyformer.batches.episode_batches import ClippedObjective, RolloutBatch
from manyformer.core import State
from manyformer.environments import VectorEnvironment
from manyformer.errors import UserError
from manyformer.rollouts.acting_loop import ActedStep, ActingLoop, ActingPolicy, PolicyInputs, sample_actions
from manyformer.type_aliases import IntArray

EPISODE_SCORES = ("return", "episode_length", "success")
"""The names of the means over episodes."""

ROLLOUT_DIAGNOSTICS = ("entropy", "explained_variance")
"""The names of what a rollout says about its policy: the entropy of its actions in nats, and the share of the variance
of returns that its values explain."""


class RolloutSettings(NamedTuple):
    """How rollouts are made: the steps of each row, the discount of rewards (gamma), the lambda of advantages, and the
    objective that the policy learns from them with."""

    steps: int
    discount: float
    gae_lambda: float
    objective: ClippedObjective


class EpisodeProgress(NamedTuple):
    """The sums of rewards and the numbers of steps of the running episodes."""

    returns: Float[Tensor, " b"]
    lengths: Float[Tensor, " b"]


class RolloutCollector:
    """Acts with the current weights of a policy, one rollout after the other, without losing running episodes.

    `state` is the state of the policy after the last step, `scores` are the mean return and length (and success) of the
    episodes that ended in the latest rollout in which any did, and the diagnostics of the latest rollout.
    """

    def __init__(self, environment: VectorEnvironment, policy: ActingPolicy, settings: RolloutSettings) -> None:
        assert isinstance(policy, nn.Module)
        self.environment = environment
        self.policy = policy
        self.settings = settings
        self._module: nn.Module = policy
        self.loop = ActingLoop(environment, policy, sample_actions)
        self.state: State = policy.init_state(environment.rows)
        self.progress = EpisodeProgress(*torch.zeros(2, environment.rows, dtype=torch.float64))
        self.scores: dict[str, float] = {}

    def begin(self, seeds: IntArray) -> None:
        """Begin the first episode of every row."""
        self.loop.reset(seeds)

    @torch.no_grad()
    def collect(self) -> RolloutBatch:
        """Act for the steps of one rollout. Raises UserError for what the environment cannot do."""
        training = self._module.training
        self._module.eval()
        try:
            device = next(self._module.parameters()).device
            first_state = self.state
            actor = self.policy.begin_acting(self.state)
            steps = list[ActedStep]()
            next_values = list[Tensor]()
            for _ in range(self.settings.steps):
                step = self.loop.step(actor, device)
                if steps:
                    next_values[-1] = torch.where(_truncated(steps[-1]), next_values[-1], step.values)
                # the value after a limit of time is that of the observation which the episode ended with
                is_cut = bool(step.result.truncated.any())
                next_values.append(actor.value(*step.final_inputs.to(device)).cpu() if is_cut else step.values)
                steps.append(step)
            assert self.loop.inputs is not None
            last_values = actor.value(*self.loop.inputs.to(device)).cpu()
            next_values[-1] = torch.where(_truncated(steps[-1]), next_values[-1], last_values)
            self.state = actor.end()
        finally:
            self._module.train(training)
        self._count_episodes(steps)
        rollout = self._batch(steps, torch.stack(next_values, 1), first_state)
        self.scores = {**self.scores, **_diagnostics(rollout)}
        return rollout

    def _batch(self, steps: list[ActedStep], next_values: Float[Tensor, "b l"], state: State) -> RolloutBatch:
        inputs = PolicyInputs(*(torch.stack(parts, 1) for parts in zip(*(step.inputs for step in steps), strict=True)))
        values = torch.stack([step.values for step in steps], 1)
        results = [step.result for step in steps]
        rewards = torch.from_numpy(np.stack([result.rewards for result in results], 1))
        terminated = torch.from_numpy(np.stack([result.terminated for result in results], 1))
        done = torch.from_numpy(np.stack([result.done for result in results], 1))
        advantages = gae(
            values, next_values, rewards, terminated, done, self.settings.discount, self.settings.gae_lambda
        )
        return RolloutBatch(
            inputs.observations,
            torch.stack([step.actions for step in steps], 1),
            advantages=advantages,
            returns=advantages + values,
            segments=inputs.segments,
            previous_actions=inputs.previous_actions,
            previous_rewards=inputs.previous_rewards,
            log_probs=torch.stack([step.log_probs for step in steps], 1),
            values=values,
            state=state,
            objective=self.settings.objective,
        )

    def _count_episodes(self, steps: list[ActedStep]) -> None:
        ended_returns = list[Tensor]()
        ended_lengths = list[Tensor]()
        returns, lengths = self.progress
        for step in steps:
            returns = returns + torch.from_numpy(step.result.rewards)
            lengths = lengths + 1
            done = torch.from_numpy(step.result.done)
            ended_returns.append(returns[done])
            ended_lengths.append(lengths[done])
            returns = returns.masked_fill(done, 0)
            lengths = lengths.masked_fill(done, 0)
        self.progress = EpisodeProgress(returns, lengths)
        all_returns = torch.cat(ended_returns)
        if len(all_returns):
            self.scores = episode_scores(all_returns, torch.cat(ended_lengths), self.environment.success_return)


def episode_scores(
    returns: Float[Tensor, " n"], lengths: Float[Tensor, " n"], success_return: float | None
) -> dict[str, float]:
    """The mean return and length of episodes, and the share of successes where the environment has any."""
    scores = {"return": float(returns.mean()), "episode_length": float(lengths.mean())}
    if success_return is not None:
        scores["success"] = float((returns >= success_return).double().mean())
    return scores


def _diagnostics(rollout: RolloutBatch) -> dict[str, float]:
    """The diagnostics of a rollout; the entropy is estimated by the log-probabilities of the actions drawn."""
    assert rollout.log_probs is not None
    assert rollout.values is not None
    scores = {"entropy": -float(rollout.log_probs.mean())}
    if variance := float(rollout.returns.var(correction=0)):
        scores["explained_variance"] = 1 - float((rollout.returns - rollout.values).var(correction=0)) / variance
    return scores


def gae(
    values: Float[Tensor, "b l"],
    next_values: Float[Tensor, "b l"],
    rewards: Float[Tensor, "b l"],
    terminated: Bool[Tensor, "b l"],
    done: Bool[Tensor, "b l"],
    discount: float,
    gae_lambda: float,
) -> Float[Tensor, "b l"]:
    """The advantages of generalized advantage estimation (Schulman et al. 2016, arXiv:1506.02438, equation 16).

    `next_values` follow each step in its own episode; no advantage reaches over an episode that is done, and nothing
    follows one that is terminated. Computed by torchrl. Raises UserError where it is not installed.
    """
    try:
        from torchrl.objectives.value.functional import generalized_advantage_estimate
    except ImportError as error:
        raise UserError('advantages need one more library: pip install "manyformer[rl]"') from error
    columns: list[Any] = [part[..., None] for part in (values, next_values, rewards, done, terminated)]
    advantages, _ = generalized_advantage_estimate(discount, gae_lambda, *columns)
    result: Tensor = advantages[..., 0]
    return result


def check_scores(scores: Mapping[str, float]) -> dict[str, float]:
    """The scores that a file says a collector had. Raises ValueError for others."""
    if not set(scores) <= {*EPISODE_SCORES, *ROLLOUT_DIAGNOSTICS} or not all(map(math.isfinite, scores.values())):
        raise ValueError("these are no scores of rollouts")
    return dict(scores)


def _truncated(step: ActedStep) -> Bool[Tensor, " b"]:
    return torch.from_numpy(step.result.truncated)
