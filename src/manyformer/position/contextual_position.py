"""Positions counted by content: how many tokens lie between a query and a key is decided by the query."""

from typing import final

import torch
from torch import nn

from manyformer.core import TokenPositions
from manyformer.position.distance_terms import signed_distances
from manyformer.position.position import Keys, PairScores, Position, Queries


@final
class ContextualPosition(Position):
    """CoPE: a query counts the tokens since a key through gates (Golovneva et al. 2024, arXiv:2405.18719, section 4).

    The position of key j for query i is the sum of sigmoid(q_i k_m / sqrt(e)) over the tokens m from j to i, both
    included, at most `count` - 1. A score gets the unscaled product of the query with the vector of that position,
    interpolated linearly between whole positions. As in the paper one table, zero at first, serves all heads of a
    layer. A gate needs every token from the key to the query, hence the mask `Causal()`.
    """

    needs_every_key = True

    def __init__(self, width: int, count: int = 64) -> None:
        super().__init__()
        if count < 2:
            raise ValueError(f"ContextualPosition: count ({count}) must be at least 2 positions")
        self.vectors = nn.Parameter(torch.zeros(count, width))

    def score(
        self, logits: PairScores, q: Queries, k: Keys, query_positions: TokenPositions, key_positions: TokenPositions
    ) -> PairScores:
        earlier = signed_distances(query_positions, key_positions) <= 0
        visible = (earlier & query_positions.same_document(key_positions))[:, None]
        gates = logits.to(torch.promote_types(logits.dtype, torch.float32)).sigmoid().masked_fill(~visible, 0.0)
        # summed from the query back, so that the sums of near keys are exact whatever came before them
        position = gates.flip(-1).cumsum(-1).flip(-1).clamp(max=len(self.vectors) - 1)
        lower = position.detach().floor()
        share = (position - lower).to(logits.dtype)
        index = lower.long()
        terms = q @ self.vectors.T.to(q.dtype)
        next_terms = terms.gather(-1, (index + 1).clamp(max=len(self.vectors) - 1))
        return logits + torch.lerp(terms.gather(-1, index), next_terms, share)

    def extra_repr(self) -> str:
        return f"count={len(self.vectors)}"
