"""Many feed-forward networks of equal shape as one module, for tokens that are sorted by network."""

from collections.abc import Sequence
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from manyformer.ops.expert_groups import ExpertGroups


@final
class ExpertLinear(nn.Module):
    """A linear projection for each expert, stored as one tensor.

    Every expert then has a gradient in each step, zero where it got no token, as sharded and averaged training need."""

    def __init__(self, num_experts: int, inputs: int, outputs: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, outputs, inputs))
        self.bias = nn.Parameter(torch.zeros(num_experts, outputs)) if bias else None
        for weight in self.weight.data:
            nn.init.xavier_uniform_(weight)

    def forward(self, x: Float[Tensor, "n i"], groups: ExpertGroups) -> Float[Tensor, "n o"]:
        """Project rows sorted by expert."""
        return groups.project(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        experts, outputs, inputs = self.weight.shape
        return f"{experts} experts, {inputs} -> {outputs}, bias={self.bias is not None}"


@final
class GatedUnit(nn.Module):
    """The product of two projections, one through an activation (Shazeer 2020, arXiv:2002.05202, section 2)."""

    def __init__(self, activation: nn.Module | None = None) -> None:
        super().__init__()
        self.activation = nn.SiLU() if activation is None else activation

    def forward(self, gate: Float[Tensor, "n m"], up: Float[Tensor, "n m"]) -> Float[Tensor, "n m"]:
        y: Tensor = self.activation(gate) * up
        return y


@final
class ClampedSwiGLU(nn.Module):
    """(up + 1) gate sigmoid(slope gate), with gate at most `limit` and up from -`limit` to `limit`.

    The unit of gpt-oss (OpenAI 2025, arXiv:2508.10925)."""

    def __init__(self, slope: float = 1.702, limit: float = 7.0) -> None:
        super().__init__()
        self.slope = slope
        self.limit = limit

    def forward(self, gate: Float[Tensor, "n m"], up: Float[Tensor, "n m"]) -> Float[Tensor, "n m"]:
        gate = gate.clamp(max=self.limit)
        up = up.clamp(-self.limit, self.limit)
        return (up + 1) * gate * torch.sigmoid(self.slope * gate)

    def extra_repr(self) -> str:
        return f"slope={self.slope}, limit={self.limit}"


@final
class GatedExperts(nn.Module):
    """Gated feed-forward networks, as `GatedFeedForward` for tokens sorted by expert; the `unit` joins its two halves.

    `ff_dim` is the width of one expert."""

    def __init__(
        self, num_experts: int, dim: int, ff_dim: int, *, unit: nn.Module | None = None, bias: bool = False
    ) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.gate = ExpertLinear(num_experts, dim, ff_dim, bias=bias)
        self.up = ExpertLinear(num_experts, dim, ff_dim, bias=bias)
        self.down = ExpertLinear(num_experts, ff_dim, dim, bias=bias)
        self.unit = GatedUnit() if unit is None else unit

    @property
    def weights(self) -> Sequence[Tensor]:
        """All matrices (experts, outputs, inputs)."""
        return self.gate.weight, self.up.weight, self.down.weight

    def forward(self, x: Float[Tensor, "n d"], groups: ExpertGroups) -> Float[Tensor, "n d"]:
        y: Tensor = self.down(self.unit(self.gate(x, groups), self.up(x, groups)), groups)
        return y


@final
class FeedForwardExperts(nn.Module):
    """Feed-forward networks of two projections, as `FeedForward` for tokens sorted by expert."""

    def __init__(
        self, num_experts: int, dim: int, ff_dim: int, *, activation: nn.Module | None = None, bias: bool = False
    ) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.up = ExpertLinear(num_experts, dim, ff_dim, bias=bias)
        self.down = ExpertLinear(num_experts, ff_dim, dim, bias=bias)
        self.activation = nn.ReLU() if activation is None else activation

    @property
    def weights(self) -> Sequence[Tensor]:
        """All matrices (experts, outputs, inputs)."""
        return self.up.weight, self.down.weight

    def forward(self, x: Float[Tensor, "n d"], groups: ExpertGroups) -> Float[Tensor, "n d"]:
        y: Tensor = self.down(self.activation(self.up(x, groups)), groups)
        return y
