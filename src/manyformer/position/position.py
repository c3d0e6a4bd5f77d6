"""The five places where a position can enter, all of them identities until a part overrides them."""

from typing import ClassVar, final

from jaxtyping import Float
from torch import Tensor, nn

from manyformer.core import TokenPositions
from manyformer.position.distance_terms import DistanceTerms

SEAMS = ("embed", "query", "key", "score", "value")


class Position(nn.Module):
    """How positions enter a model: override the seams that matter, as functions of places, never of tensor indices.

    `embed` acts on embeddings and belongs to the model; the other four act inside attention, where the kernel must
    honour them. `key` is applied once, before a key is cached.
    """

    _touched: ClassVar[frozenset[str]] = frozenset()
    max_length: int | None = None
    """The number of positions there are; None where any position will do."""
    max_distance: int | None = None
    """The distance beyond which `distance_terms` takes all keys for alike; None where it tells every distance apart."""

    def embed(self, x: Float[Tensor, "b l d"], positions: TokenPositions) -> Float[Tensor, "b l d"]:
        return x

    def query(self, q: Float[Tensor, "b h l e"], positions: TokenPositions) -> Float[Tensor, "b h l e"]:
        return q

    def key(self, k: Float[Tensor, "b g l e"], positions: TokenPositions) -> Float[Tensor, "b g l e"]:
        return k

    def score(
        self,
        logits: Float[Tensor, "b h l s"],
        q: Float[Tensor, "b h l e"],
        k: Float[Tensor, "b h s e"],
        query_positions: TokenPositions,
        key_positions: TokenPositions,
    ) -> Float[Tensor, "b h l s"]:
        return logits

    def value(
        self,
        y: Float[Tensor, "b h l f"],
        weights: Float[Tensor, "b h l s"],
        query_positions: TokenPositions,
        key_positions: TokenPositions,
    ) -> Float[Tensor, "b h l f"]:
        return y

    def distance_terms(self, back: int, ahead: int) -> DistanceTerms | None:
        """What `score` and `value` do, for keys up to `back` before and `ahead` after a query; None if it is more.

        Kernels ask for it because it is cheaper; it must say exactly what the two seams do.
        """
        return None

    def penalty(self) -> Tensor | float:
        """What this position adds to the auxiliary loss."""
        return 0.0

    def required_seams(self) -> frozenset[str]:
        """The seams that this part overrides."""
        return self._touched

    def __init_subclass__(cls) -> None:
        # once for each class: kernels ask at every call
        cls._touched = frozenset(seam for seam in SEAMS if getattr(cls, seam) is not getattr(Position, seam))


@final
class NoPosition(Position):
    """Positions enter nowhere: all that the model knows of order is what its masks tell."""
