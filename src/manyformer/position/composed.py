"""A composition of several positions."""

from typing import final

from jaxtyping import Float
from torch import Tensor, nn

from manyformer.core import TokenPositions
from manyformer.position.position import Keys, Outputs, PairScores, Position, Queries


@final
class ComposedPosition(Position):
    """Applies the seams of all parts one after another, each to the result of the previous part."""

    def __init__(self, *parts: Position) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.needs_every_key = any(part.needs_every_key for part in parts)
        self.max_length = min((part.max_length for part in parts if part.max_length is not None), default=None)

    def embed(self, x: Float[Tensor, "b l d"], positions: TokenPositions) -> Float[Tensor, "b l d"]:
        for part in self._parts():
            x = part.embed(x, positions)
        return x

    def query(self, q: Float[Tensor, "b h l e"], positions: TokenPositions) -> Float[Tensor, "b h l e"]:
        for part in self._parts():
            q = part.query(q, positions)
        return q

    def key(self, k: Float[Tensor, "b g l e"], positions: TokenPositions) -> Float[Tensor, "b g l e"]:
        for part in self._parts():
            k = part.key(k, positions)
        return k

    def score(
        self, logits: PairScores, q: Queries, k: Keys, query_positions: TokenPositions, key_positions: TokenPositions
    ) -> PairScores:
        for part in self._parts():
            logits = part.score(logits, q, k, query_positions, key_positions)
        return logits

    def value(
        self, y: Outputs, weights: PairScores, query_positions: TokenPositions, key_positions: TokenPositions
    ) -> Outputs:
        for part in self._parts():
            y = part.value(y, weights, query_positions, key_positions)
        return y

    def penalty(self) -> Tensor | float:
        return sum((part.penalty() for part in self._parts()), 0.0)

    def required_seams(self) -> frozenset[str]:
        return frozenset().union(*(part.required_seams() for part in self._parts()))

    def _parts(self) -> list[Position]:
        return list(self.parts)  # type: ignore[arg-type]
