"""Plays whole episodes with a policy, for scores, pictures and recordings."""

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, Self, final

import numpy as np
import torch
from jaxtyping import Int64
from numpy.typing import NDArray
from torch import Tensor, nn

from manyformer.batches.episode_batches import PlayedEpisodes
from manyformer.environments import VectorEnvironment
from manyformer.errors import UserError
from manyformer.rollouts.acting_loop import ActedStep, ActingLoop, ActingPolicy, SelectFn, likeliest_actions
from manyformer.type_aliases import IntArray

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
