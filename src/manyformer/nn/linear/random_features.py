"""Random features whose products estimate a kernel without bias.

Positive ones, FAVOR+ and its generalization (Choromanski et al. 2021, Rethinking Attention), and those of unit vectors
(Peng et al. 2021, Random Feature Attention).
"""

import math
from collections.abc import Callable
from typing import Any, Literal, final

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from manyformer.nn.core import TokenPositions
from manyformer.nn.linear.feature_map import (
    FeatureValues,
    RandomFeatures,
    independent_directions,
    orthogonal_directions,
    regularized_directions,
)
from manyformer.nn.runtime.handwritten_gradient import HandwrittenGradient
from manyformer.nn.runtime.training_hooks import UndecayedParameters

DirectionSampling = Literal["orthogonal", "independent", "regularized"]

DRAWS: dict[DirectionSampling, Callable[[int, int, torch.Generator], Tensor]] = {
    "orthogonal": orthogonal_directions,
    "independent": independent_directions,
    "regularized": regularized_directions,
}


class _FavorFeatures(RandomFeatures):
    """Features plus `floor` from orthogonal or independent directions, the same for all heads."""

    features_per_direction = 1

    def __init__(
        self,
        key_dim: int,
        features: int,
        *,
        directions: DirectionSampling = "orthogonal",
        redraw: int | None = None,
        floor: float = 1e-6,
    ) -> None:
        if features % self.features_per_direction:
            raise ValueError(f"{type(self).__name__}: features ({features}) must be even, two for each direction")
        self.directions = directions
        self.floor = floor
        super().__init__(key_dim, features // self.features_per_direction, heads=1, redraw=redraw)

    def draw(self, count: int, key_dim: int, generator: torch.Generator) -> Float[Tensor, "r e"]:
        return DRAWS[self.directions](count, key_dim, generator)


@final
class FavorPlusFeatures(_FavorFeatures):
    """exp(w.x - |x|^2 / 2) for random w and x / e^(1/4): an unbiased estimate of exp(q.k / sqrt(e)), section 2.3.

    The features of each token are divided by their maximum, which is returned in `FeatureValues.log_scale`; the
    published code divides those of all keys by the maximum over the row, so that later keys change earlier outputs.
    Then `floor` is added to every feature, as there (1e-6), so that the weights of a query cannot all vanish. As there,
    the maximum is a constant for gradients: without a floor it cancels.
    """

    def forward(self, x: Float[Tensor, "b h l e"], positions: TokenPositions) -> FeatureValues:
        matrix = self.matrix[0].to(x.dtype)
        return FeatureValues(*_FavorPlusFunction.call(x, matrix, self.floor))


@final
class HyperbolicFavorFeatures(_FavorFeatures):
    """`FavorPlusFeatures` of half as many directions and of the opposite ones (Choromanski et al. 2021, lemma 1).

    The mean of exp(w.z) and exp(-w.z) has a smaller variance than two independent directions (lemma 2)."""

    features_per_direction = 2

    def forward(self, x: Float[Tensor, "b h l e"], positions: TokenPositions) -> FeatureValues:
        # opposite directions: their mean is a hyperbolic cosine, whose variance is smaller
        matrix = torch.cat([self.matrix[0], -self.matrix[0]]).to(x.dtype)
        return FeatureValues(*_FavorPlusFunction.call(x, matrix, self.floor))


@final
class TrigonometricFavorFeatures(_FavorFeatures):
    """exp(|x|^2 / 2) times sin(w.x) and cos(w.x), for contrast (Choromanski et al. 2021, section 2.3, equation 4).

    Its estimate of exp(q.k / sqrt(e)) is unbiased, too, but may be negative, and its error is largest where the
    kernel is small (lemma 2): sums of weights may vanish, and a floor of signed features would not change that."""

    features_per_direction = 2
    signed = True

    def __init__(
        self, key_dim: int, features: int, *, directions: DirectionSampling = "orthogonal", redraw: int | None = None
    ) -> None:
        super().__init__(key_dim, features, directions=directions, redraw=redraw)

    def forward(self, x: Float[Tensor, "b h l e"], positions: TokenPositions) -> FeatureValues:
        angles = self.project(x, x.shape[-1] ** -0.25)
        # as a scale, not as a factor of features: it may overflow
        half_norm = x.square().sum(-1) / (2 * x.shape[-1] ** 0.5)
        return FeatureValues(torch.cat([angles.sin(), angles.cos()], -1) * angles.shape[-1] ** -0.5, half_norm)


@final
class GeneralizedFavorFeatures(_FavorFeatures):
    """f(w.x) + floor for random w and x / e^(1/4), f being `activation` (section 2.2; ReLU and 1e-3 as in section 4).

    With ReLU it is the arc-cosine kernel of first order (Cho and Saul 2009), not an estimate of softmax.
    """

    def __init__(
        self,
        key_dim: int,
        features: int,
        *,
        activation: nn.Module | None = None,
        directions: DirectionSampling = "orthogonal",
        redraw: int | None = None,
        floor: float = 1e-3,
    ) -> None:
        super().__init__(key_dim, features, directions=directions, redraw=redraw, floor=floor)
        self.activation = nn.ReLU() if activation is None else activation

    def forward(self, x: Float[Tensor, "b h l e"], positions: TokenPositions) -> FeatureValues:
        return FeatureValues(self.activation(self.project(x, x.shape[-1] ** -0.25)) + self.floor)


class _FavorPlusFunction(HandwrittenGradient):
    """Features divided by their maximum, and the logarithm of their common scale; saves inputs and features."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, matrix: Tensor, floor: float) -> tuple[Tensor, Tensor]:
        # with the head axis before the token axis in memory, one product serves all heads
        x = x.clone(memory_format=torch.contiguous_format).mul_(x.shape[-1] ** -0.25)
        y = x @ matrix.T
        maximum = y.amax(-1, keepdim=True)
        y.sub_(maximum).exp_().add_(floor)
        ctx.save_for_backward(x, matrix, y)
        ctx.floor = floor
        # the estimate is the mean over directions
        half_norm = torch.linalg.vector_norm(x, dim=-1).square_().div_(2)
        return y, maximum[..., 0] - half_norm - math.log(y.shape[-1]) / 2

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        x, matrix, y = ctx.saved_tensors
        dy, dlog = grad_outputs
        # y minus the floor is its own derivative; the scale has |x|^2 / 2, the maximum being a constant
        dx = ((y - ctx.floor).mul_(dy) @ matrix).addcmul_(x, dlog[..., None], value=-1)
        return dx.mul_(x.shape[-1] ** -0.25), None, None

    @classmethod
    def plain(cls, *arguments: Any) -> tuple[Tensor, Tensor]:
        x, matrix, floor = arguments
        x = x * x.shape[-1] ** -0.25
        projected = x @ matrix.T
        # a constant, which cancels between features and scale
        maximum = projected.detach().amax(-1, keepdim=True)
        y = (projected - maximum).exp() + floor
        return y, maximum[..., 0] - x.square().sum(-1) / 2 - math.log(y.shape[-1]) / 2


class _UnitVectorFeatures(RandomFeatures, UndecayedParameters):
    """Random directions for each head, scaled by a learned rate for each channel; inputs become unit vectors."""

    undecayed = ("rate",)

    head_axes = (("matrix", -3), ("rate", -2))

    def __init__(self, key_dim: int, features: int, *, heads: int, redraw: int | None = None) -> None:
        super().__init__(key_dim, features, heads=heads, redraw=redraw)
        # the logarithm of 1 / sigma, so that sigma stays positive
        self.rate = nn.Parameter(torch.zeros(heads, key_dim))

    def draw(self, count: int, key_dim: int, generator: torch.Generator) -> Float[Tensor, "r e"]:
        return independent_directions(count, key_dim, generator)

    def angles(self, x: Float[Tensor, "b h l e"]) -> Float[Tensor, "b h l r"]:
        """The products of unit vectors with every direction."""
        return self.project(F.normalize(x, dim=-1).contiguous(), self.rate.exp()[:, None, :])


@final
class RandomFourierFeatures(_UnitVectorFeatures):
    """sin(w.x) and cos(w.x) of unit vectors: an unbiased estimate of exp(-|q - k|^2 / 2 sigma^2), section 3.1.

    Among unit vectors that is exp(q.k / sigma^2) but for a factor that cancels. The directions have the deviation
    1 / sigma, where the paper's text has sigma; sigma is learned for each head and channel and initialized to 1. Half
    of the `features` are sines. Sums of weights may be close to 0 or negative: `LinearKernel` needs a `floor` of about
    1e-3.
    """

    signed = True

    def __init__(self, key_dim: int, features: int, *, heads: int, redraw: int | None = None) -> None:
        if features % 2:
            raise ValueError(
                f"RandomFourierFeatures: features ({features}) must be even, each direction has a sine and a cosine"
            )
        super().__init__(key_dim, features // 2, heads=heads, redraw=redraw)

    def forward(self, x: Float[Tensor, "b h l e"], positions: TokenPositions) -> FeatureValues:
        angles = self.angles(x)
        return FeatureValues(_SineCosineFunction.call(angles, angles.shape[-1] ** -0.5))


@final
class ArcCosineFeatures(_UnitVectorFeatures):
    """relu(w.x) of unit vectors: the arc-cosine kernel of first order (section 3.1, after Cho and Saul 2009)."""

    def forward(self, x: Float[Tensor, "b h l e"], positions: TokenPositions) -> FeatureValues:
        angles = self.angles(x)
        return FeatureValues(angles.relu() * angles.shape[-1] ** -0.5)


class _SineCosineFunction(HandwrittenGradient):
    """Sines and cosines times `scale`; saves only its output, since each is the derivative of the other."""

    @staticmethod
    def forward(ctx: Any, angles: Tensor, scale: float) -> Tensor:
        count = angles.shape[-1]
        y = angles.new_empty(*angles.shape[:-1], 2 * count)
        torch.sin(angles, out=y[..., :count])
        torch.cos(angles, out=y[..., count:])
        y.mul_(scale)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        (y,) = ctx.saved_tensors
        sine, cosine = y.chunk(2, -1)
        sine_grad, cosine_grad = grad_output.chunk(2, -1)
        return (sine_grad * cosine).addcmul_(cosine_grad, sine, value=-1), None

    @classmethod
    def plain(cls, *arguments: Any) -> Any:
        angles, scale = arguments
        return torch.cat([angles.sin(), angles.cos()], -1) * scale
