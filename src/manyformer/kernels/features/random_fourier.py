"""Random features of unit vectors (Peng et al. 2021, Random Feature Attention)."""

from typing import Any, final

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from manyformer.core import TokenPositions
from manyformer.kernels.features.feature_map import FeatureValues, RandomFeatures, independent_directions
from manyformer.training_hooks import UndecayedParameters


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
        return FeatureValues(_SineCosineFunction.apply(angles, angles.shape[-1] ** -0.5))  # type: ignore[no-untyped-call]


@final
class ArcCosineFeatures(_UnitVectorFeatures):
    """relu(w.x) of unit vectors: the arc-cosine kernel of first order (section 3.1, after Cho and Saul 2009)."""

    def forward(self, x: Float[Tensor, "b h l e"], positions: TokenPositions) -> FeatureValues:
        angles = self.angles(x)
        return FeatureValues(angles.relu() * angles.shape[-1] ** -0.5)


class _SineCosineFunction(torch.autograd.Function):
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
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        (y,) = ctx.saved_tensors
        sine, cosine = y.chunk(2, -1)
        sine_grad, cosine_grad = grad_output.chunk(2, -1)
        return (sine_grad * cosine).addcmul_(cosine_grad, sine, value=-1), None
