"""Positive random features: FAVOR+ and its generalisation (Choromanski et al. 2021, Rethinking Attention)."""

import math
from typing import Any, Literal, final

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from manyformer.core import TokenPositions
from manyformer.kernels.features.feature_map import (
    FeatureValues,
    RandomFeatures,
    independent_directions,
    orthogonal_directions,
)

DirectionSampling = Literal["orthogonal", "independent"]


@final
class FavorPlusFeatures(RandomFeatures):
    """exp(w.x - |x|^2 / 2) for random w and x / e^(1/4): an unbiased estimate of exp(q.k / sqrt(e)), section 2.3.

    Every token's features are divided by the largest of them, which stands in `FeatureValues.log`; the published code
    divides those of all keys by the largest over the whole row, so that later keys reach earlier outputs. `floor` is
    added to every feature after that, as there (1e-6): no query then finds all keys vanished. Gradients take the
    largest as given, as there: without a floor it cancels.
    """

    def __init__(
        self,
        key: int,
        features: int,
        *,
        directions: DirectionSampling = "orthogonal",
        redraw: int | None = None,
        floor: float = 1e-6,
    ) -> None:
        self.directions, self.floor = directions, floor
        super().__init__(key, features, heads=1, redraw=redraw)

    def draw(self, count: int, key: int, generator: torch.Generator) -> Float[Tensor, "r e"]:
        return _drawn(self.directions, count, key, generator)

    def forward(self, x: Float[Tensor, "b h l e"], positions: TokenPositions) -> FeatureValues:
        matrix = self.matrix[0].to(x.dtype)
        return FeatureValues(*_Positive.apply(x, matrix, self.floor))  # type: ignore[no-untyped-call]


@final
class GeneralizedFavorFeatures(RandomFeatures):
    """f(w.x) + floor for random w and x / e^(1/4), f being `activation` (section 2.2; ReLU and 1e-3 as in section 4).

    With ReLU it is the arc-cosine kernel of first order (Cho and Saul 2009), with no softmax behind it.
    """

    def __init__(
        self,
        key: int,
        features: int,
        *,
        activation: nn.Module | None = None,
        directions: DirectionSampling = "orthogonal",
        redraw: int | None = None,
        floor: float = 1e-3,
    ) -> None:
        self.directions, self.floor = directions, floor
        super().__init__(key, features, heads=1, redraw=redraw)
        self.activation = nn.ReLU() if activation is None else activation

    def draw(self, count: int, key: int, generator: torch.Generator) -> Float[Tensor, "r e"]:
        return _drawn(self.directions, count, key, generator)

    def forward(self, x: Float[Tensor, "b h l e"], positions: TokenPositions) -> FeatureValues:
        return FeatureValues(self.activation(self.project(x, x.shape[-1] ** -0.25)) + self.floor)


def _drawn(directions: DirectionSampling, count: int, key: int, generator: torch.Generator) -> Float[Tensor, "r e"]:
    return (orthogonal_directions if directions == "orthogonal" else independent_directions)(count, key, generator)


class _Positive(torch.autograd.Function):
    """Features over the largest of them, and the logarithm of their common scale; keeps inputs and features."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, matrix: Tensor, floor: float) -> tuple[Tensor, Tensor]:
        # heads before tokens in memory, so that all products are one
        x = x.clone(memory_format=torch.contiguous_format).mul_(x.shape[-1] ** -0.25)
        y = x @ matrix.T
        top = y.amax(-1, keepdim=True)
        y.sub_(top).exp_().add_(floor)
        ctx.save_for_backward(x, matrix, y)
        ctx.floor = floor
        # the estimate is the mean over directions
        half = torch.linalg.vector_norm(x, dim=-1).square_().div_(2)
        return y, top[..., 0] - half - math.log(y.shape[-1]) / 2

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *up: Tensor) -> tuple[Tensor, None, None]:
        (x, matrix, y), (dy, dlog) = ctx.saved_tensors, up
        dx = ((y - ctx.floor).mul_(dy) @ matrix).addcmul_(x, dlog[..., None], value=-1)
        return dx.mul_(x.shape[-1] ** -0.25), None, None
