"""Feature maps without random numbers: of linear attention, of recurrent layers, and learned ones that imitate softmax.

Outputs of recurrent layers are not divided by a sum of weights, so that products of their features may have any sign.
Learned maps imitate the softmax attention of a trained model.
"""

import math
from collections.abc import Callable
from typing import Any, final

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from manyformer.nn.core import ContiguousLayout, TokenPositions
from manyformer.nn.linear.feature_map import FeatureMap, FeatureValues, project_heads
from manyformer.nn.positions.absolute import last_position
from manyformer.nn.runtime.handwritten_gradient import HandwrittenGradient
from manyformer.nn.runtime.head_selection import PerHeadTensors
from manyformer.nn.runtime.length_norms import unit_length

EPSILON = 1e-6
"""Added to squared lengths: a vector of zeros stays zero."""


@final
class EluPlusOneFeatures(FeatureMap):
    """elu(x) + 1 of every channel (Katharopoulos et al. 2020, section 3.2.1), without the scale 1 / sqrt(e)."""

    def forward(self, x: Float[Tensor, "b h l e"], positions: TokenPositions) -> FeatureValues:
        return FeatureValues(_EluPlusOneFunction.call(x))


def elu_plus_one(x: Tensor) -> Tensor:
    """elu(x) + 1."""
    y: Tensor = _EluPlusOneFunction.call(x)
    return y


class _EluPlusOneFunction(HandwrittenGradient):
    """elu(x) + 1 that saves only its output for the backward pass, with the head axis before the token axis."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.contiguous()
        # exp(x) below 0 and x + 1 above: on a CPU half the time of elu, which is exact near 0 where 1 is added anyway
        y = x.clamp(max=0.0).exp_().add_(x.relu())
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        # the slope is exp(x) = y below 0, and 1 above, where y exceeds 1
        grad_input: Tensor = grad_output * y.clamp(max=1.0)
        return grad_input

    @classmethod
    def plain(cls, *arguments: Any) -> Any:
        (x,) = arguments
        return F.elu(x) + 1


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
        # on both sides: the product is q.k / sqrt(e)
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
        # channels are a ring, so that each has as many products
        products = [rectified * rectified.roll(step, -1) for step in range(1, self.reach + 1)]
        return FeatureValues(torch.cat(products, dim=-1))

    def extra_repr(self) -> str:
        return f"reach={self.reach}"


@final
class ScaledFeatures(FeatureMap):
    """`activation` of x, if there is one, times `scale`."""

    signed = True

    def __init__(self, scale: float = 1.0, activation: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.scale = scale
        self.activation = activation

    def forward(self, x: Float[Tensor, "b h l e"], positions: TokenPositions) -> FeatureValues:
        x = x if self.activation is None else self.activation(x)
        return FeatureValues(x if self.scale == 1.0 else x * self.scale)

    def extra_repr(self) -> str:
        return f"scale={self.scale:.3g}"


@final
class UnitLengthFeatures(FeatureMap):
    """x / sqrt(|x|^2 + 1e-6) times `scale` (Yang et al. 2024, arXiv:2406.06484, section 3.3)."""

    signed = True

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: Float[Tensor, "b h l e"], positions: TokenPositions) -> FeatureValues:
        return FeatureValues(unit_length(x, scale=self.scale, eps=EPSILON))

    def extra_repr(self) -> str:
        return f"scale={self.scale:.3g}"


@final
class T2RFeatures(FeatureMap, PerHeadTensors):
    """relu(W x + b) with W and b of each head, for queries and keys alike (Kasai et al. 2021, arXiv:2103.13076).

    Section 3.1, without the reduction of the scale of queries, which W contains. `heads` are those of keys; W begins as
    in `nn.Linear`, b as 0. Raises ValueError for sizes below 1."""

    head_axes = (("weight", -3), ("bias", -2))

    def __init__(self, key_dim: int, features: int, *, heads: int) -> None:
        super().__init__()
        for name, value in (("key_dim", key_dim), ("features", features), ("heads", heads)):
            if value < 1:
                raise ValueError(f"T2RFeatures: {name} ({value}) must be at least 1")
        bound = key_dim**-0.5
        self.weight = nn.Parameter(torch.empty(heads, features, key_dim).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.zeros(heads, features))

    def forward(self, x: Float[Tensor, "b h l e"], positions: TokenPositions) -> FeatureValues:
        bias = self.bias.repeat_interleave(x.shape[1] // len(self.bias), 0)[:, None]
        return FeatureValues((project_heads(x, self.weight) + bias.to(x.dtype)).relu())

    def extra_repr(self) -> str:
        heads, features, key_dim = self.weight.shape
        return f"{features} of {key_dim} channels, {heads} heads"


@final
class HedgehogFeatures(FeatureMap, PerHeadTensors):
    """softmax(W x) and softmax(-W x) with W of each head, the identity at first (Zhang et al. 2024, arXiv:2402.04347).

    Section 4.1; queries and keys have a map each, so `LinearKernel` takes two. The sum of weights is never 0. `heads`
    are those of the queries, or of the keys. Raises ValueError for sizes below 1."""

    head_axes = (("weight", -3),)

    def __init__(self, key_dim: int, *, heads: int) -> None:
        super().__init__()
        for name, value in (("key_dim", key_dim), ("heads", heads)):
            if value < 1:
                raise ValueError(f"HedgehogFeatures: {name} ({value}) must be at least 1")
        self.weight = nn.Parameter(torch.eye(key_dim).repeat(heads, 1, 1))

    def forward(self, x: Float[Tensor, "b h l e"], positions: TokenPositions) -> FeatureValues:
        return FeatureValues(self.map(x))

    def map(self, x: Float[Tensor, "b h l e"]) -> Float[Tensor, "b h l r"]:
        """The features, which do not depend on positions."""
        scores = project_heads(x, self.weight)
        return torch.cat([scores.softmax(-1), (-scores).softmax(-1)], dim=-1)

    def extra_repr(self) -> str:
        heads, features, key_dim = self.weight.shape
        return f"{2 * features} of {key_dim} channels, {heads} heads"
