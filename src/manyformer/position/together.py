"""Several positions at once."""

from typing import final

from jaxtyping import Float
from torch import Tensor, nn

from manyformer.core import Place
from manyformer.position.base import Position


@final
class Together(Position):
    """Every seam goes through all parts in turn: what one adds to a score, the next adds to."""

    def __init__(self, *parts: Position) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.longest = min((part.longest for part in parts if part.longest is not None), default=None)

    def embed(self, x: Float[Tensor, "b l d"], place: Place) -> Float[Tensor, "b l d"]:
        for part in self._parts():
            x = part.embed(x, place)
        return x

    def query(self, q: Float[Tensor, "b h l e"], place: Place) -> Float[Tensor, "b h l e"]:
        for part in self._parts():
            q = part.query(q, place)
        return q

    def key(self, k: Float[Tensor, "b g l e"], place: Place) -> Float[Tensor, "b g l e"]:
        for part in self._parts():
            k = part.key(k, place)
        return k

    def score(
        self,
        logits: Float[Tensor, "b h l s"],
        q: Float[Tensor, "b h l e"],
        k: Float[Tensor, "b h s e"],
        at: Place,
        of: Place,
    ) -> Float[Tensor, "b h l s"]:
        for part in self._parts():
            logits = part.score(logits, q, k, at, of)
        return logits

    def value(
        self, y: Float[Tensor, "b h l f"], weights: Float[Tensor, "b h l s"], at: Place, of: Place
    ) -> Float[Tensor, "b h l f"]:
        for part in self._parts():
            y = part.value(y, weights, at, of)
        return y

    def penalty(self) -> Tensor | float:
        return sum((part.penalty() for part in self._parts()), 0.0)

    def touches(self) -> frozenset[str]:
        return frozenset().union(*(part.touches() for part in self._parts()))

    def _parts(self) -> list[Position]:
        return list(self.parts)  # type: ignore[arg-type]
