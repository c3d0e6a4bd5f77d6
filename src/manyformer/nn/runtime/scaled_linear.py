"""Linear maps whose outputs are multiplied by constants: the multipliers of maximal update parametrization."""

from collections.abc import Sequence
from typing import final

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn


@final
class ScaledLinear(nn.Linear):
    """diag(m) (W x + b), with a constant m for each of adjacent parts of the rows, given as pairs (rows, m).

    The function is that of a matrix with scaled rows; gradients, and so the steps of an optimizer, are not (Yang et al.
    2022, arXiv:2203.03466). Raises ValueError for parts that are not all rows."""

    def __init__(self, inputs: int, parts: Sequence[tuple[int, float]], *, bias: bool = False) -> None:
        super().__init__(inputs, sum(rows for rows, _ in parts), bias=bias)
        self.parts = tuple(parts)

    @classmethod
    def replacing(cls, linear: nn.Linear, parts: Sequence[tuple[int, float]]) -> "ScaledLinear":
        """A scaled map with the weight and the bias of `linear`."""
        if sum(rows for rows, _ in parts) != linear.out_features:
            raise ValueError(
                f"ScaledLinear: parts ({list(parts)}) must be the {linear.out_features} rows of the matrix"
            )
        scaled = cls(linear.in_features, parts, bias=linear.bias is not None)
        scaled.weight = linear.weight
        if linear.bias is not None:
            scaled.bias = linear.bias
        return scaled

    def forward(self, x: Float[Tensor, "*b i"]) -> Float[Tensor, "*b o"]:
        y = F.linear(x, self.weight, self.bias)
        if len(self.parts) == 1:
            return y * self.parts[0][1]
        # numbers, not a table of the model's dtype, which would round them
        rows = torch.split(y, [rows for rows, _ in self.parts], -1)
        return torch.cat([part * factor for part, (_, factor) in zip(rows, self.parts)], -1)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, parts={self.parts}"


@final
class ConstantScale(nn.Module):
    """A constant times its input."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
        return x * self.factor

    def extra_repr(self) -> str:
        return f"{self.factor}"
