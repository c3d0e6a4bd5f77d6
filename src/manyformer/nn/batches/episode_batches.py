"""The batch records of episodes: what policies did in environments, and recorded trajectories."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, Self, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int64, Shaped
from numpy.typing import NDArray
from torch import Tensor

from manyformer.base.type_aliases import IntArray
from manyformer.nn.batches.batch import IGNORE_INDEX, SegmentLayout, count_valid
from manyformer.nn.core import PADDING_SEGMENT, State


@dataclass(frozen=True, kw_only=True)
class ClippedObjective:
    """The weights of the clipped objective of proximal policy optimization (Schulman et al. 2017, equations 7 and 9).

    `clip` is epsilon, `value_weight` c_1 and `entropy_weight` c_2. With `normalize_advantages` a batch has advantages
    of mean 0 and deviation 1, unless their deviation is below 1e-3, where that would only amplify noise."""

    clip: float = 0.2
    value_weight: float = 0.5
    entropy_weight: float = 0.01
    normalize_advantages: bool = True


class RolloutBatch(NamedTuple):
    """Rows of consecutive steps that a policy made in environments, one environment to a row.

    `segments` numbers the episodes of a row in ascending order, -1 is no step. `state` is the state of the policy
    before the first step (a tree of tensors, rows first), with which it acted. `log_probs` and `values` are those of
    the acting policy; without log_probs the objective is the plain policy gradient. A previous action of -1 is none.
    """

    observations: Shaped[Tensor, "b l *shape"]
    actions: Shaped[Tensor, "b l *a"]
    advantages: Float[Tensor, "b l"]
    returns: Float[Tensor, "b l"]
    segments: Int64[Tensor, "b l"]
    previous_actions: Shaped[Tensor, "b l *a"] | None = None
    previous_rewards: Float[Tensor, "b l"] | None = None
    log_probs: Float[Tensor, "b l"] | None = None
    values: Float[Tensor, "b l"] | None = None
    state: State = None
    objective: ClippedObjective = ClippedObjective()
    # Where the episodes are; None where nobody has read it.
    layout: SegmentLayout = None

    def target_count(self) -> int:
        return count_valid(self.segments, self.segments)

    def token_count(self) -> int:
        return self.target_count()

    def ignored(self) -> Self:
        return self._replace(segments=torch.full_like(self.segments, PADDING_SEGMENT), layout=None)


class PlayedEpisodes(NamedTuple):
    """The results of one episode for each row; `successes` is None where the environment has no such thing."""

    returns: NDArray[np.float64]
    lengths: IntArray
    successes: NDArray[np.bool_] | None


@runtime_checkable
class EpisodesToPlay(Protocol):
    """Held-out episodes, one to a row, by which a policy is scored: it plays them in their environments."""

    @property
    def seeds(self) -> Int64[Tensor, " b"]:
        """What determines the episode of each row, besides the actions."""

    # Any, because the interface of policies stands with those who play, which read these records
    def play(self, policy: Any) -> PlayedEpisodes:
        """Play the episodes with the likeliest actions."""

    def score_sums(self, policy: Any) -> Mapping[str, Tensor]:
        """The sums of returns, steps, episodes and, where there are any, successes."""


class TrajectoryBatch(NamedTuple):
    """Windows of episodes, a time step per column; a row may hold several windows, each a segment, -1 is padding.

    `returns` are the sums of rewards from each step to the end of its episode. Discrete actions are whole numbers, and
    targets that are not scored `IGNORE_INDEX`; other actions are vectors, and such targets are NaN. `timesteps` count
    from the beginning of the episode."""

    returns: Float[Tensor, "b l"]
    observations: Float[Tensor, "b l f"]
    actions: Int64[Tensor, "b l"] | Float[Tensor, "b l a"]
    targets: Int64[Tensor, "b l"] | Float[Tensor, "b l a"]
    timesteps: Int64[Tensor, "b l"]
    segments: Int64[Tensor, "b l"]
    # Where the windows are; None where nobody has read it.
    layout: SegmentLayout = None

    def target_count(self) -> int:
        return int(count_action_targets(self.targets))

    def token_count(self) -> int:
        return count_valid(self.timesteps, self.segments)

    def ignored(self) -> Self:
        if self.targets.is_floating_point():
            ignored = math.nan
        else:
            ignored = IGNORE_INDEX
        return self._replace(targets=torch.full_like(self.targets, ignored))


def count_action_targets(targets: Int64[Tensor, "*b"] | Float[Tensor, "*b a"]) -> Int64[Tensor, ""]:
    """The number of discrete or continuous actions that are scored."""
    if targets.is_floating_point():
        return (~targets[..., 0].isnan()).sum()
    # a tensor, which stays on its device until somebody needs the number
    return (targets != IGNORE_INDEX).sum()
