"""Norms of the queries and keys of each head, applied before their scores are computed."""

from typing import final

from jaxtyping import Float
from torch import Tensor

from manyformer.core import TokenPositions
from manyformer.length_norms import RMSNorm
from manyformer.position.position import Position


@final
class HeadNorm(Position):
    """Divides queries and keys by their root mean square in each head, with a gain for each channel ("QK-norm").

    Henry et al. 2020 (arXiv:2010.04245) normalize them so that scores cannot saturate; this is the form of Qwen3 (2025,
    arXiv:2505.09388, section 2), before rotary positions, with one gain for all heads. `width` is that of a head.
    """

    def __init__(self, width: int, *, eps: float = 1e-6) -> None:
        super().__init__()
        self.query_norm = RMSNorm(width, eps)
        self.key_norm = RMSNorm(width, eps)

    def query(self, q: Float[Tensor, "b h l e"], positions: TokenPositions) -> Float[Tensor, "b h l e"]:
        return _normalized(q, self.query_norm)

    def key(self, k: Float[Tensor, "b g l e"], positions: TokenPositions) -> Float[Tensor, "b g l e"]:
        return _normalized(k, self.key_norm)


def _normalized(x: Tensor, norm: RMSNorm) -> Tensor:
    # under autocast the projections are narrower than the gain
    normalized: Tensor = norm(x.to(norm.weight.dtype))
    return normalized.to(x.dtype)
