"""Weight functions: softmax and its alternatives."""

from abc import ABC, abstractmethod
from typing import final

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn


class WeightFunction(nn.Module, ABC):
    """Maps scores to weights of visible keys and 0 for all other keys; a row without visible keys gets zeros."""

    @abstractmethod
    def forward(self, scores: Float[Tensor, "*b l s"], visible: Bool[Tensor, "*#b l s"]) -> Float[Tensor, "*b l s"]: ...


@final
class SoftmaxWeights(WeightFunction):
    """Softmax."""

    def forward(self, scores: Float[Tensor, "*b l s"], visible: Bool[Tensor, "*#b l s"]) -> Float[Tensor, "*b l s"]:
        has_visible = visible.any(-1, keepdim=True)
        scores = scores.masked_fill(~visible, -torch.inf).masked_fill(~has_visible, 0.0)
        return scores.softmax(-1).masked_fill(~visible, 0.0)


@final
class ReluWeights(WeightFunction):
    """relu(score)^power divided by their sum, or by `floor` if the sum is smaller.

    Power 2 is the squared ReLU. Keys with negative scores have weight 0, and so all weights of a row may be 0.
    """

    def __init__(self, *, power: int = 1, floor: float = 1e-6) -> None:
        super().__init__()
        if power < 1:
            raise ValueError(f"ReluWeights: power ({power}) must be at least 1")
        self.power = power
        self.floor = floor

    def forward(self, scores: Float[Tensor, "*b l s"], visible: Bool[Tensor, "*#b l s"]) -> Float[Tensor, "*b l s"]:
        weights = scores.relu().pow(self.power).masked_fill(~visible, 0.0)
        return weights / weights.sum(-1, keepdim=True).clamp(min=self.floor)

    def extra_repr(self) -> str:
        return f"power={self.power}, floor={self.floor}"


@final
class ReluMeanWeights(WeightFunction):
    """relu(score) over the number of visible keys (Wortsman et al. 2023, arXiv:2309.08586); they need not sum to 1."""

    def forward(self, scores: Float[Tensor, "*b l s"], visible: Bool[Tensor, "*#b l s"]) -> Float[Tensor, "*b l s"]:
        return scores.relu().masked_fill(~visible, 0.0) / visible.sum(-1, keepdim=True).clamp(min=1)


@final
class SigmoidWeights(WeightFunction):
    """sigmoid(score - log n), n the number of visible keys (Ramapuram et al. 2024, arXiv:2409.04431, section 3.3).

    Keys do not compete: the weights need not sum to 1, though at initialization their sum is close to 1.
    """

    def forward(self, scores: Float[Tensor, "*b l s"], visible: Bool[Tensor, "*#b l s"]) -> Float[Tensor, "*b l s"]:
        count = visible.sum(-1, keepdim=True).clamp(min=1).to(scores.dtype)
        return (scores - count.log()).sigmoid().masked_fill(~visible, 0.0)
