"""Plays whole episodes with a policy, for scores and pictures, and records them; also with one that acts at random."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Self, final

import numpy as np
import torch
from jaxtyping import Int64
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributions import Distribution

from manyformer.base.environments import Trajectories, VectorEnvironment
from manyformer.base.errors import UserError
from manyformer.base.spaces import ActionSpace, DiscreteActions
from manyformer.base.type_aliases import IntArray
from manyformer.data.rollouts.acting_loop import ActedStep, ActingLoop, ActingPolicy, SelectFn, likeliest_actions
from manyformer.nn.batches.episode_batches import PlayedEpisodes
from manyformer.nn.core import State

MAX_STEPS = 100_000
"""The steps after which an episode that is played to its end is given up."""


@torch.no_grad()
def play_steps(
    environment: VectorEnvironment,
    policy: ActingPolicy,
    seeds: IntArray,
    select: SelectFn,
    *,
    before_step: Callable[[], None] = lambda: None,
) -> Iterator[tuple[ActedStep, NDArray[np.bool_]]]:
    """Yield every step until the first episode of each row has ended, with the rows in which it was running.

    `before_step` is called before each. Raises UserError for an episode that does not end.
    """
    assert isinstance(policy, nn.Module)
    training = policy.training
    policy.eval()
    # a random policy has no parameters
    device = next(policy.parameters(), torch.empty(0)).device
    loop = ActingLoop(environment, policy, select)
    running = np.ones(environment.rows, bool)
    loop.reset(seeds)
    actor = policy.begin_acting(policy.init_state(environment.rows))
    try:
        for _ in range(MAX_STEPS):
            before_step()
            step = loop.step(actor, device)
            yield step, running
            # rows whose first episode has ended go on with further ones, which nobody counts
            running = running & ~step.result.done
            if not running.any():
                return
    finally:
        policy.train(training)
    raise UserError(
        f"an episode of {environment.name} has not ended after {MAX_STEPS:,} steps; limit it, for an environment of "
        "gymnasium with data.options.max_episode_steps"
    )


def play_episodes(
    environment: VectorEnvironment, policy: ActingPolicy, seeds: IntArray, select: SelectFn = likeliest_actions
) -> PlayedEpisodes:
    """The results of the first episode of each row."""
    returns = np.zeros(environment.rows)
    lengths = np.zeros(environment.rows, np.int64)
    for step, running in play_steps(environment, policy, seeds, select):
        returns += step.result.rewards * running
        lengths += running
    success_return = environment.success_return
    return PlayedEpisodes(returns, lengths, None if success_return is None else returns >= success_return)


@final
class EpisodeBatch(NamedTuple):
    """Held-out episodes, one to a row: their seeds, and the function that creates their environment."""

    seeds: Int64[Tensor, " b"]
    make_environment: Callable[[int], VectorEnvironment]

    def target_count(self) -> int:
        return len(self.seeds)

    def token_count(self) -> int:
        return len(self.seeds)

    def ignored(self) -> Self:
        raise NotImplementedError("episodes are played by one process")

    def play(self, policy: ActingPolicy) -> PlayedEpisodes:
        """Play the episodes with the likeliest actions."""
        seeds = self.seeds.cpu().numpy()
        return play_episodes(self.make_environment(len(seeds)), policy, seeds)

    def score_sums(self, policy: ActingPolicy) -> Mapping[str, Tensor]:
        """The sums of returns, steps, episodes and, where there are any, successes."""
        episodes = self.play(policy)
        sums = {"return": episodes.returns.sum(), "steps": episodes.lengths.sum(), "episodes": len(episodes.returns)}
        if episodes.successes is not None:
            sums["success"] = episodes.successes.sum()
        return {name: torch.tensor(float(value), dtype=torch.float64) for name, value in sums.items()}


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
