"""The objective of a policy on a batch of rollouts."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from manyformer.batches.episode_batches import ClippedObjective

MIN_ADVANTAGE_STD = 1e-3
"""Advantages with a smaller deviation are not normalized."""


class StepLosses(NamedTuple):
    """The parts of the objective, one number for each step: what is minimized is their weighted sum."""

    policy: Float[Tensor, "b l"]
    value: Float[Tensor, "b l"]
    entropy: Float[Tensor, "b l"]

    def total(self, objective: ClippedObjective) -> Float[Tensor, "b l"]:
        """The objective of each step."""
        return self.policy + objective.value_weight * self.value - objective.entropy_weight * self.entropy


def policy_loss(
    log_probs: Float[Tensor, "b l"],
    acting_log_probs: Float[Tensor, "b l"] | None,
    advantages: Float[Tensor, "b l"],
    clip: float,
) -> Float[Tensor, "b l"]:
    """-min(r A, clip(r, 1 - epsilon, 1 + epsilon) A) with r the ratio of the probabilities of an action now and then.

    Schulman et al. 2017, arXiv:1707.06347, equation 7. Without the log-probabilities of the acting policy it is that
    of the policy gradient, -A log p (Williams 1992)."""
    if acting_log_probs is None:
        return -advantages * log_probs
    ratio = (log_probs - acting_log_probs).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)


def normalize_advantages(advantages: Float[Tensor, "b l"], valid: Bool[Tensor, "b l"]) -> Float[Tensor, "b l"]:
    """Advantages with mean 0 and deviation 1 over the valid steps, unless they are nearly equal."""
    count = valid.sum().clamp(min=1)
    centered = advantages - (advantages * valid).sum() / count
    std = ((centered.square() * valid).sum() / count).sqrt()
    return torch.where(std < MIN_ADVANTAGE_STD, advantages, centered / std.clamp(min=MIN_ADVANTAGE_STD))
