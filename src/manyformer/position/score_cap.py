"""A bound on attention scores."""

from typing import final

from torch import Tensor

from manyformer.core import TokenPositions
from manyformer.position.position import Keys, PairScores, Position, Queries


@final
class ScoreCap(Position):
    """Scores s become cap tanh(s / cap), which are between -cap and cap (Gemma 2, 2024, arXiv:2408.00118, section 2).

    Scores are computed explicitly for it, since torch's fused attention cannot change them. Raises ValueError unless
    `cap` is above 0."""

    def __init__(self, cap: float) -> None:
        super().__init__()
        if cap <= 0:
            raise ValueError(f"ScoreCap: cap ({cap}) must be above 0")
        self.cap = cap

    def score(
        self, logits: PairScores, q: Queries, k: Keys, query_positions: TokenPositions, key_positions: TokenPositions
    ) -> PairScores:
        return capped(logits, self.cap)

    def extra_repr(self) -> str:
        return f"{self.cap:g}"


def capped(x: Tensor, cap: float) -> Tensor:
    """cap tanh(x / cap): about x where that is small, and between -cap and cap everywhere."""
    return (x / cap).tanh() * cap
