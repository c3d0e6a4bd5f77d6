"""A learned vector for each distance to an earlier key, added to keys."""

from typing import final

import torch
from torch import nn

from manyformer.core import TokenPositions
from manyformer.position.distance_terms import DistanceTerms, signed_distances
from manyformer.position.position import Keys, PairScores, Position, Queries
from manyformer.position.relative import key_score_terms


@final
class KeyDistancePosition(Position):
    """Scores q_i (k_j + p_(i-j)) / sqrt(e), a vector p for each distance up to `max_distance` (Sukhbaatar et al. 2019).

    arXiv:1905.07799, section 2; as in the authors' code one table serves all heads and, if it is the same object, all
    layers. The mask must hide keys at larger distances and later keys: their distances are clamped to the table.
    """

    def __init__(self, width: int, max_distance: int) -> None:
        super().__init__()
        if max_distance < 1:
            raise ValueError(f"KeyDistancePosition: max_distance ({max_distance}) must be at least 1")
        # row 0 is for `max_distance`, the last row for distance 0
        self.keys = nn.Parameter(torch.randn(max_distance + 1, width) / width**0.5)

    def score(
        self, logits: PairScores, q: Queries, k: Keys, query_positions: TokenPositions, key_positions: TokenPositions
    ) -> PairScores:
        max_distance = len(self.keys) - 1
        rows = signed_distances(query_positions, key_positions).clamp(-max_distance, 0) + max_distance
        return logits + key_score_terms(q, self.keys, rows)

    def distance_terms(self, lookback: int, lookahead: int) -> DistanceTerms:
        lookback = min(lookback, len(self.keys) - 1)
        rows = self.keys[len(self.keys) - 1 - lookback :]
        return DistanceTerms(lookback, 0, keys=rows[None] * rows.shape[1] ** -0.5)

    def extra_repr(self) -> str:
        return f"max_distance={len(self.keys) - 1}"
