"""Deterministic feature maps."""

import math
from typing import Any, final

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from manyformer.core import ContiguousLayout, TokenPositions
from manyformer.kernels.features.feature_map import FeatureMap, FeatureValues
from manyformer.position.absolute import last_position


@final
class EluPlusOneFeatures(FeatureMap):
    """elu(x) + 1 of every channel (Katharopoulos et al. 2020, section 3.2.1), without the scale 1 / sqrt(e)."""

    def forward(self, x: Float[Tensor, "b h l e"], positions: TokenPositions) -> FeatureValues:
        return FeatureValues(elu_plus_one(x))


@final
class CosineReweightingFeatures(FeatureMap):
    """relu(x) cos(p) and relu(x) sin(p) with p = pi / 2 of position / `max_length` (Qin et al. 2022, section 3.2).

    The product falls with the distance as cos(p_i - p_j), which is never negative.
    """

    max_length: int

    def __init__(self, max_length: int) -> None:
        super().__init__()
        if max_length < 1:
            raise ValueError(f"CosineReweightingFeatures: max_length ({max_length}) must be at least 1 position")
        self.max_length = max_length

    def forward(self, x: Float[Tensor, "b h l e"], positions: TokenPositions) -> FeatureValues:
        self._check_length(positions)
        angle = positions.position_ids[:, None, :, None].to(x.dtype) * (math.pi / 2 / self.max_length)
        x = x.relu()
        return FeatureValues(torch.cat([x * angle.cos(), x * angle.sin()], dim=-1))

    def _check_length(self, positions: TokenPositions) -> None:
        if isinstance(positions.layout, ContiguousLayout):
            last = positions.layout.start + positions.position_ids.shape[1] - 1
        else:
            last = last_position(positions.position_ids)
        if last >= self.max_length:
            raise ValueError(
                f"position {last} does not exist: CosineReweightingFeatures was built for max_length={self.max_length}"
            )

    def extra_repr(self) -> str:
        return f"max_length={self.max_length}"


@final
class TaylorFeatures(FeatureMap):
    """1, x and all products of two of its channels: the Taylor series 1 + s + s^2 / 2 of exp(s), s = q.k / sqrt(e).

    Zhang et al. 2024 (arXiv:2402.04347), section 3.2. The sum is never below 1/2; there are 1 + e + e^2 features.
    """

    signed = True

    def forward(self, x: Float[Tensor, "b h l e"], positions: TokenPositions) -> FeatureValues:
        x = x * x.shape[-1] ** -0.25
        pairs = (x[..., :, None] * x[..., None, :]).flatten(-2) * math.sqrt(0.5)
        return FeatureValues(torch.cat([torch.ones_like(x[..., :1]), x, pairs], dim=-1))


@final
class DPFPFeatures(FeatureMap):
    """Products of rectified channels that are up to `reach` channels apart (Schlag et al. 2021, section 5.3: DPFP).

    Each of the 2 e channels relu(x), relu(-x) is multiplied with the 1st to the `reach`th channel after it. The
    features are sparse, so that more keys can be orthogonal than x has channels.
    """

    def __init__(self, *, reach: int = 1) -> None:
        super().__init__()
        if reach < 1:
            raise ValueError(f"DPFPFeatures: reach ({reach}) must be at least 1")
        self.reach = reach

    def forward(self, x: Float[Tensor, "b h l e"], positions: TokenPositions) -> FeatureValues:
        rectified = torch.cat([x, -x], dim=-1).relu()
        products = [rectified * rectified.roll(step, -1) for step in range(1, self.reach + 1)]
        return FeatureValues(torch.cat(products, dim=-1))

    def extra_repr(self) -> str:
        return f"reach={self.reach}"


def elu_plus_one(x: Tensor) -> Tensor:
    """elu(x) + 1."""
    y: Tensor = _EluPlusOneFunction.apply(x)  # type: ignore[no-untyped-call]
    return y


class _EluPlusOneFunction(torch.autograd.Function):
    """elu(x) + 1 that saves only its output for the backward pass, with the head axis before the token axis."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.contiguous()
        # exp(x) below 0 and x + 1 above: on a CPU half the time of elu, which is exact near 0 where 1 is added anyway
        y = x.clamp(max=0.0).exp_().add_(x.relu())
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        # the slope is exp(x) = y below 0, and 1 above, where y exceeds 1
        grad_input: Tensor = grad_output * y.clamp(max=1.0)
        return grad_input
