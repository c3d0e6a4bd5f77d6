"""The output head for continuous actions in a box."""

from typing import Any, final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from manyformer.batches.episode_batches import count_action_targets
from manyformer.errors import UserError
from manyformer.models.head import BatchLoss, BatchScore, OutputHead

Bounds = tuple[float, ...]
"""The lowest or the highest value of each component of an action."""

MAX_BOUND = 1e30
"""Beyond it the size of a box may not be a number of 32 bits."""

NEAR = 0.1
"""An action is right if all of its components are as near to those of the target, in units of half the box."""


@final
class BoundedActionHead(OutputHead):
    """Continuous actions as tanh of a projection, scaled to a box; that of Chen et al. 2021 is -1 to 1 (section 3).

    The loss is the squared error in units of half the box, averaged over the components. Targets that do not count are
    NaN. Raises UserError if the bounds are not one finite range for each component."""

    low: Float[Tensor, " a"]
    high: Float[Tensor, " a"]

    def __init__(self, dim: int, actions: int, low: Bounds | None = None, high: Bounds | None = None) -> None:
        super().__init__()
        lowest = [-1.0] * actions if low is None else low
        highest = [1.0] * actions if high is None else high
        if len(lowest) != actions or len(highest) != actions:
            raise UserError(f"action_low ({low}) and action_high ({high}) must have a number for each of {actions}")
        if not all(-MAX_BOUND < lower < upper < MAX_BOUND for lower, upper in zip(lowest, highest)):
            raise UserError(
                f"action_low ({low}) must be below action_high ({high}) in every number, all of them finite"
            )
        self.classes = actions
        self.project = nn.Linear(dim, actions)
        self.register_buffer("low", torch.tensor(lowest))
        self.register_buffer("high", torch.tensor(highest))

    def forward(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b a"]:
        unit: Tensor = self.project(x).tanh()
        return self.low + (unit + 1) * ((self.high - self.low) / 2)

    def normalize(self, actions: Float[Tensor, "*b a"]) -> Float[Tensor, "*b a"]:
        """The actions with the box mapped to -1 to 1."""
        return (actions - self.low) * (2 / (self.high - self.low)) - 1

    def loss(self, x: Float[Tensor, "*b d"], targets: Any, *, label_smoothing: float) -> BatchLoss:
        if label_smoothing:
            raise UserError(f"loss.label_smoothing ({label_smoothing}) is for discrete actions; these are continuous")
        return BatchLoss(self._errors(x, targets).float().square().mean(-1).sum(), count_action_targets(targets))

    def score(self, x: Float[Tensor, "*b d"], targets: Any) -> BatchScore:
        errors = self._errors(x, targets)
        nll = errors.float().square().mean(-1).cpu().double().sum()
        is_right = (errors.abs() <= NEAR).all(-1) & ~targets[..., 0].isnan()
        return BatchScore(nll, count_action_targets(targets), is_right.sum())

    def _errors(self, x: Float[Tensor, "*b d"], targets: Float[Tensor, "*b a"]) -> Float[Tensor, "*b a"]:
        """The differences in units of half the box, 0 where the target does not count."""
        scored = ~targets.isnan()
        # replaced before the difference: the gradient of a NaN is NaN even where its weight is zero
        unit: Tensor = self.project(x).tanh()
        return (unit - self.normalize(torch.where(scored, targets, self.low))) * scored
