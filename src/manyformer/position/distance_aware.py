"""Distances that multiply scores: the DA-Transformer."""

from typing import final

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from manyformer.core import ContiguousLayout, TokenPositions
from manyformer.position.distance_terms import broadcast_pairs, distance
from manyformer.position.position import Position


@final
class DistanceAwarePosition(Position):
    """Scores relu(q k / sqrt(e)) times a learned function of the distance (Wu et al. 2021, DA-Transformer, section 3).

    Of R = w |i - j| it is (1 + exp(v)) / (1 + exp(v - R)): 1 at distance 0, falling to 0 where w is negative, rising to
    1 + exp(v) where it is positive; w and v are two numbers for each head. The paper gives no start: here w is -0.1
    and 0.1 by turns, so that some heads look near and others far, and v is 0. A score of zero is no missing key:
    it still has the weight of exp(0), so masks come after. The distance has no direction; under a mask that is not
    causal, a text and its reverse are alike.
    """

    def __init__(self, heads: int) -> None:
        super().__init__()
        if heads < 1:
            raise ValueError(f"DistanceAwarePosition: heads ({heads}) must be at least 1")
        self.w = nn.Parameter(torch.tensor([(-0.1, 0.1)[head % 2] for head in range(heads)]))
        self.v = nn.Parameter(torch.zeros(heads))

    def score(
        self,
        logits: Float[Tensor, "b h l s"],
        q: Float[Tensor, "b h l e"],
        k: Float[Tensor, "b h s e"],
        query_positions: TokenPositions,
        key_positions: TokenPositions,
    ) -> Float[Tensor, "b h l s"]:
        if isinstance(query_positions.layout, ContiguousLayout) and isinstance(key_positions.layout, ContiguousLayout):
            # once for each distance, of which there are far fewer than pairs
            first, queries = key_positions.layout.start - query_positions.layout.start, logits.shape[2]
            far = torch.arange(first - queries + 1, first + logits.shape[3], device=logits.device)
            return logits.relu() * broadcast_pairs(self.factor(far), queries)
        return logits.relu() * self.factor(distance(query_positions, key_positions)).transpose(0, 1)

    def factor(self, far: Int[Tensor, "*p"]) -> Float[Tensor, "h *p"]:
        """What scores of pairs at these distances are multiplied by; written so that no exponential overflows."""
        w, v = (x.view(-1, *(1 for _ in far.shape)) for x in (self.w, self.v))
        return torch.exp(F.softplus(v) - F.softplus(v - w * far.abs()))
