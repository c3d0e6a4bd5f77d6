"""Recorded episodes, of a trained policy or of one that acts at random."""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from manyformer.core import State
from manyformer.environments import Trajectories, VectorEnvironment
from manyformer.rollouts.acting_loop import ActedStep, ActingPolicy, SelectFn
from manyformer.rollouts.episode_player import play_steps
from manyformer.spaces import ActionSpace, DiscreteActions
from manyformer.type_aliases import IntArray


def record_episodes(
    environment: VectorEnvironment, policy: ActingPolicy, seeds: IntArray, select: SelectFn, *, source: str
) -> Trajectories:
    """The first episode of each row, one after the other; `source` says who acted."""
    steps = list[ActedStep]()
    running = list[Any]()
    for step, rows in play_steps(environment, policy, seeds, select):
        steps.append(step)
        running.append(rows)
    # (rows, steps): the steps of a row come one after the other, without those after its first episode
    chosen = np.stack(running, 1)
    lengths = chosen.sum(axis=1)
    results = [step.result for step in steps]
    return Trajectories(
        np.stack([step.inputs.observations.numpy() for step in steps], 1)[chosen],
        np.stack([step.environment_actions for step in steps], 1)[chosen],
        np.stack([result.rewards for result in results], 1)[chosen],
        np.stack([result.terminated for result in results], 1)[chosen],
        np.stack([result.truncated for result in results], 1)[chosen],
        lengths,
        np.full(environment.rows, source),
        np.stack([result.final_observations for result in results], 1)[np.arange(environment.rows), lengths - 1],
    )


def join_trajectories(parts: list[Trajectories]) -> Trajectories:
    """All episodes of several recordings in the same environment."""
    return Trajectories(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


class RandomOutputs(NamedTuple):
    """Logits of equally probable actions, and values of 0."""

    logits: Tensor
    values: Tensor


class RandomPolicy(nn.Module):
    """Acts at random: every action is equally probable, and every vector within the bounds."""

    def __init__(self, actions: ActionSpace) -> None:
        super().__init__()
        self.actions = actions

    def init_state(self, batch: int) -> State:
        """There is nothing to remember."""
        return None

    def begin_acting(self, state: State) -> "RandomPolicy":
        """The policy itself, which has no weights."""
        return self

    def distribution(self, logits: Tensor) -> Distribution:
        """Uniform over the actions, or over what the hyperbolic tangent maps uniformly to (-1, 1)."""
        if isinstance(self.actions, DiscreteActions):
            return torch.distributions.Categorical(logits=logits)
        # the bounds are left out, at which the inverse is infinite
        edge = torch.full_like(logits, 1 - 1e-6)
        uniform = torch.distributions.Uniform(-edge, edge)
        squashing = torch.distributions.TanhTransform().inv
        return torch.distributions.Independent(torch.distributions.TransformedDistribution(uniform, [squashing]), 1)

    def act(self, observations: Tensor, *previous_inputs: Tensor) -> RandomOutputs:
        """Equal logits for all rows."""
        rows = len(observations)
        return RandomOutputs(torch.zeros(rows, self.actions.size), torch.zeros(rows))

    def value(self, observations: Tensor, *previous_inputs: Tensor) -> Tensor:
        """Zeros for all rows."""
        return torch.zeros(len(observations))

    def end(self) -> State:
        """There is nothing to remember."""
        return None
