"""The distance-aware position of the DA-Transformer, which multiplies scores by a function of the distance."""

from typing import final

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from manyformer.core import TokenPositions
from manyformer.head_selection import PerHeadTensors
from manyformer.position.distance_terms import evaluate_distances
from manyformer.position.position import Keys, PairScores, Position, Queries


@final
class DistanceAwarePosition(Position, PerHeadTensors):
    """Scores relu(q k / sqrt(e)) times a learned function of the distance (Wu et al. 2021, DA-Transformer, section 3).

    With R = w |i - j| it is (1 + exp(v)) / (1 + exp(v - R)): 1 at distance 0, falling to 0 for negative w, rising to
    1 + exp(v) for positive w; each head has its own w and v. The paper gives no initialization: here w alternates
    between -0.1 and 0.1, so that even heads prefer small distances and odd heads large ones, and v is 0. A key of
    score zero is not hidden: its weight is that of exp(0), so masks are applied afterwards. The distance has no
    direction; under a bidirectional mask, a text and its reverse give the same outputs.
    """

    head_axes = (("w", -1), ("v", -1))
    uses_positive_scores = True

    def __init__(self, heads: int) -> None:
        super().__init__()
        if heads < 1:
            raise ValueError(f"DistanceAwarePosition: heads ({heads}) must be at least 1")
        self.w = nn.Parameter(torch.tensor([(-0.1, 0.1)[head % 2] for head in range(heads)]))
        self.v = nn.Parameter(torch.zeros(heads))

    def score(
        self, logits: PairScores, q: Queries, k: Keys, query_positions: TokenPositions, key_positions: TokenPositions
    ) -> PairScores:
        return logits.relu() * evaluate_distances(self.factor, query_positions, key_positions)

    def factor(self, distances: Int[Tensor, "*p"]) -> Float[Tensor, "h *p"]:
        """The factor of scores at these distances, for each head; written so that no exponential overflows."""
        w, v = (x.view(-1, *(1 for _ in distances.shape)) for x in (self.w, self.v))
        return torch.exp(F.softplus(v) - F.softplus(v - w * distances.abs()))
