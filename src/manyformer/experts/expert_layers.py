"""Many feed-forward networks of equal shape as one module, for tokens that are sorted by network."""

from collections.abc import Sequence
from typing import final

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn


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

    def forward(self, x: Float[Tensor, "n i"], counts: Sequence[int]) -> Float[Tensor, "n o"]:
        """Project tokens sorted by expert, of which expert i has `counts[i]`; one matrix product for each that has any.

        Weights are split at once, because the gradient of single ones would be as large as all of them each."""
        weights = self.weight.unbind()
        biases = [None] * len(weights) if self.bias is None else self.bias.unbind()
        parts = zip(torch.split(x, list(counts)), weights, biases, counts, strict=True)
        outputs = [F.linear(tokens, weight, bias) for tokens, weight, bias, count in parts if count]
        # no token at all: a product without rows, so that the result depends on the weights like any other
        return torch.cat(outputs) if outputs else F.linear(x, weights[0], biases[0])

    def for_groups(self, x: Float[Tensor, "g m i"], experts: Int[Tensor, " g"] | None) -> Float[Tensor, "g m o"]:
        """Project groups of tokens, each with the weights of one of the `experts`; None for all, in their order."""
        weight = self.weight if experts is None else self.weight.index_select(0, experts)
        y = x @ weight.mT
        if self.bias is None:
            return y
        return y + (self.bias if experts is None else self.bias.index_select(0, experts))[:, None]

    def extra_repr(self) -> str:
        experts, outputs, inputs = self.weight.shape
        return f"{experts} experts, {inputs} -> {outputs}, bias={self.bias is not None}"


@final
class GatedUnit(nn.Module):
    """The product of two projections, one through an activation (Shazeer 2020, arXiv:2002.05202, section 2)."""

    def __init__(self, activation: nn.Module | None = None) -> None:
        super().__init__()
        self.activation = nn.SiLU() if activation is None else activation

    def forward(self, gate: Float[Tensor, "*n m"], up: Float[Tensor, "*n m"]) -> Float[Tensor, "*n m"]:
        y: Tensor = self.activation(gate) * up
        return y


@final
class ClampedSwiGLU(nn.Module):
    """(up + 1) gate sigmoid(slope gate), with gate at most `limit` and up from -`limit` to `limit`.

    The unit of gpt-oss (OpenAI 2025, arXiv:2508.10925)."""

    def __init__(self, slope: float = 1.702, limit: float = 7.0) -> None:
        super().__init__()
        self.slope, self.limit = slope, limit

    def forward(self, gate: Float[Tensor, "*n m"], up: Float[Tensor, "*n m"]) -> Float[Tensor, "*n m"]:
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
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

    def forward(self, x: Float[Tensor, "n d"], counts: Sequence[int]) -> Float[Tensor, "n d"]:
        y: Tensor = self.down(self.unit(self.gate(x, counts), self.up(x, counts)), counts)
        return y

    def for_groups(self, x: Float[Tensor, "g m d"], experts: Int[Tensor, " g"] | None) -> Float[Tensor, "g m d"]:
        """The networks of groups of tokens, each one of the `experts`; None for all, in their order."""
        unit = self.unit(self.gate.for_groups(x, experts), self.up.for_groups(x, experts))
        return self.down.for_groups(unit, experts)


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

    def forward(self, x: Float[Tensor, "n d"], counts: Sequence[int]) -> Float[Tensor, "n d"]:
        y: Tensor = self.down(self.activation(self.up(x, counts)), counts)
        return y

    def for_groups(self, x: Float[Tensor, "g m d"], experts: Int[Tensor, " g"] | None) -> Float[Tensor, "g m d"]:
        """The networks of groups of tokens, each one of the `experts`; None for all, in their order."""
        return self.down.for_groups(self.activation(self.up.for_groups(x, experts)), experts)
