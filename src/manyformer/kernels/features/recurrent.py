"""Feature maps of recurrent layers whose outputs are not divided by a sum of weights: products may have any sign."""

from collections.abc import Callable
from typing import final

from jaxtyping import Float
from torch import Tensor

from manyformer.core import TokenPositions
from manyformer.kernels.features.feature_map import FeatureMap, FeatureValues
from manyformer.length_norms import unit_length

EPSILON = 1e-6
"""Added to squared lengths: a vector of zeros stays zero."""


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
