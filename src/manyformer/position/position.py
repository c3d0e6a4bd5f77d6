"""The interface of position encodings: five seams, each the identity until a subclass overrides it."""

from typing import ClassVar, final

from jaxtyping import Float
from torch import Tensor, nn

from manyformer.core import TokenPositions
from manyformer.position.distance_terms import DistanceTerms
from manyformer.training_hooks import UndecayedParameters

SEAMS = ("embed", "query", "key", "score", "value")

PairScores = Float[Tensor, "b h l s"]
"""Scores, or weights, of all pairs of a query and a key."""
Queries = Float[Tensor, "b h l e"]
Keys = Float[Tensor, "b h s e"]
Outputs = Float[Tensor, "b h l f"]


class Position(nn.Module, UndecayedParameters):
    """A position encoding: subclasses override seams as functions of `TokenPositions`, never of tensor indices.

    `embed` acts on embeddings and is called by the model; the other four act inside attention, where the kernel must
    support them. `key` is applied once, before a key is cached.
    """

    undecayed = None
    overridden: ClassVar[frozenset[str]] = frozenset()
    """The seams and the penalty, by their names, that the class overrides: layers need not call the others."""
    max_length: int | None = None
    """The number of positions that exist; None if there is no limit."""
    max_distance: int | None = None
    """The distance beyond which `distance_terms` gives every key the same terms; None if all distances differ."""
    uses_positive_scores: ClassVar[bool] = False
    """Whether `score` depends on the positive part of the scores alone."""
    needs_every_key: bool = False
    """Whether `score` compares a query with every earlier key of its document, so that a mask may hide none."""

    @property
    def query_vector(self) -> Float[Tensor, "h e"] | None:
        """The vector that `query` adds to every query, if that is all it does; else None."""
        return None

    def embed(self, x: Float[Tensor, "b l d"], positions: TokenPositions) -> Float[Tensor, "b l d"]:
        return x

    def query(self, q: Float[Tensor, "b h l e"], positions: TokenPositions) -> Float[Tensor, "b h l e"]:
        return q

    def key(self, k: Float[Tensor, "b g l e"], positions: TokenPositions) -> Float[Tensor, "b g l e"]:
        return k

    def score(
        self, logits: PairScores, q: Queries, k: Keys, query_positions: TokenPositions, key_positions: TokenPositions
    ) -> PairScores:
        return logits

    def value(
        self, y: Outputs, weights: PairScores, query_positions: TokenPositions, key_positions: TokenPositions
    ) -> Outputs:
        return y

    def distance_terms(self, lookback: int, lookahead: int) -> DistanceTerms | None:
        """`score` and `value` as terms of the distance, for keys from `lookback` before to `lookahead` after a query.

        Kernels prefer it because it is cheaper; it must compute exactly what the two seams compute. None if they
        depend on more than the distance.
        """
        return None

    def penalty(self) -> Tensor | float:
        """The term that this position adds to the auxiliary loss."""
        return 0.0

    def required_seams(self) -> frozenset[str]:
        """The seams that this position overrides."""
        return self.overridden - {"penalty"}

    def __init_subclass__(cls) -> None:
        # once for each class, because layers and kernels read it at every call
        methods = (*SEAMS, "penalty")
        cls.overridden = frozenset(name for name in methods if getattr(cls, name) is not getattr(Position, name))


@final
class NoPosition(Position):
    """No position encoding: order reaches the model through its masks alone."""


@final
class MaxLengthPosition(Position):
    """No position encoding, for models whose layers have weights for at most `max_length` positions."""

    def __init__(self, max_length: int) -> None:
        super().__init__()
        self.max_length = max_length

    def extra_repr(self) -> str:
        return f"max_length={self.max_length}"
