"""A learned vector for each distance to a key behind, added to keys."""

from typing import final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from manyformer.core import TokenPositions
from manyformer.position.distance_terms import DistanceTerms, distance
from manyformer.position.position import Position
from manyformer.position.relative import from_keys


@final
class KeyDistancePosition(Position):
    """Scores q_i (k_j + p_(i-j)) / sqrt(e), a vector p for each distance up to `farthest` (Sukhbaatar et al. 2019).

    arXiv:1905.07799, section 2; as in the authors' code one table serves all heads and, where it is the same object,
    all layers. Keys that are farther, or ahead, must be hidden by the mask: they are given the nearest row there is.
    """

    def __init__(self, width: int, farthest: int) -> None:
        super().__init__()
        if farthest < 1:
            raise ValueError(f"KeyDistancePosition: farthest ({farthest}) must be at least 1")
        # row 0 is the farthest, the last one the own place
        self.keys = nn.Parameter(torch.randn(farthest + 1, width) / width**0.5)

    def score(
        self,
        logits: Float[Tensor, "b h l s"],
        q: Float[Tensor, "b h l e"],
        k: Float[Tensor, "b h s e"],
        query_positions: TokenPositions,
        key_positions: TokenPositions,
    ) -> Float[Tensor, "b h l s"]:
        farthest = len(self.keys) - 1
        return logits + from_keys(q, self.keys, distance(query_positions, key_positions).clamp(-farthest, 0) + farthest)

    def distance_terms(self, back: int, ahead: int) -> DistanceTerms:
        back = min(back, len(self.keys) - 1)
        rows = self.keys[len(self.keys) - 1 - back :]
        return DistanceTerms(back, 0, keys=rows[None] * rows.shape[1] ** -0.5)

    def extra_repr(self) -> str:
        return f"up to {len(self.keys) - 1}"
