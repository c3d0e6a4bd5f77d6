"""The interface of position encodings: what a subclass overrides acts on embeddings, queries, keys, scores or values.

`DistanceTerms` is the second form of encodings that depend on the distance of two tokens alone, with the views that
evaluate such functions once for each distance instead of once for each pair.
"""

from collections.abc import Callable
from typing import ClassVar, NamedTuple, final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from manyformer.nn.core import ContiguousLayout, TokenPositions
from manyformer.nn.runtime.torch_internals import is_of_any_size
from manyformer.nn.runtime.training_hooks import UndecayedParameters


class DistanceTerms(NamedTuple):
    """Terms of a position as functions of the signed distance r = j - i of key j from query i, negative for the past.

    It adds bias[r] + (q + query_bias) keys[r] to a score, already scaled, and values[r] to the value of a key. Row 0 is
    r = -lookback and the last row r = lookahead; these two rows also serve all larger distances.
    """

    lookback: int
    lookahead: int
    bias: Float[Tensor, "#h r"] | None = None
    keys: Float[Tensor, "#h r e"] | None = None
    values: Float[Tensor, "#h r f"] | None = None
    query_bias: Float[Tensor, "h e"] | None = None


def signed_distances(query_positions: TokenPositions, key_positions: TokenPositions) -> Int[Tensor, "#b l s"]:
    """Key position minus query position of every pair; one row if all rows of the batch have the same positions."""
    if isinstance(query_positions.layout, ContiguousLayout) and isinstance(key_positions.layout, ContiguousLayout):
        return key_positions.position_ids[:1, None, :] - query_positions.position_ids[:1, :, None]
    return key_positions.position_ids[:, None, :] - query_positions.position_ids[:, :, None]


def evaluate_distances(
    function: Callable[[Tensor], Tensor], query_positions: TokenPositions, key_positions: TokenPositions
) -> Float[Tensor, "#b h l s"]:
    """`function` of the signed distances of all pairs; it maps distances (*p) to a number for each head, (h, *p)."""
    query_layout = query_positions.layout
    key_layout = key_positions.layout
    if isinstance(query_layout, ContiguousLayout) and isinstance(key_layout, ContiguousLayout):
        # evaluated once per distance, of which there are fewer than pairs
        start_difference = key_layout.start - query_layout.start
        query_count = query_positions.position_ids.shape[1]
        first = start_difference - query_count + 1
        stop = start_difference + key_positions.position_ids.shape[1]
        # every distance from the last query to the first key, up to that from the first query to the last key
        distances = torch.arange(first, stop, device=key_positions.position_ids.device)
        return broadcast_pairs(function(distances), query_count)[None]
    return function(signed_distances(query_positions, key_positions)).transpose(0, 1)


def toeplitz_view(by_distance: Float[Tensor, "*b l n"], key_count: int) -> Float[Tensor, "*b l s"]:
    """A view of columns by distance as columns by key, for queries and keys that are each contiguous, without a copy.

    The n = l + `key_count` - 1 columns are rising distances, from that between the first key and the last query. Entry
    (i, j) of the result is entry (i, l - 1 - i + j) of `by_distance`; as all distances are present, nothing wraps.
    """
    query_count, columns = by_distance.shape[-2:]
    if query_count == 1:
        return by_distance
    # each row of the result begins one column earlier than the previous row
    flat = by_distance.flatten(-2)[..., query_count - 1 : query_count * columns - 1]
    return flat.view(*flat.shape[:-1], query_count, columns - 1)[..., :key_count]


def broadcast_pairs(row: Float[Tensor, "*b n"], query_count: int) -> Float[Tensor, "*b l s"]:
    """`toeplitz_view` of a row that is the same for all queries."""
    key_count = row.shape[-1] - query_count + 1
    if is_of_any_size(key_count):
        # the size of a window would be fixed in an exported graph
        last_to_first = torch.arange(query_count - 1, -1, -1, device=row.device)
        return row[..., last_to_first[:, None] + torch.arange(key_count, device=row.device)]
    # one window of keys for each query; the last query has the first window
    return row.unfold(-1, key_count, 1).flip(-2)


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
    overridden: frozenset[str] = frozenset()
    """The seams and the penalty, by their names, that the position overrides: layers need not call the others."""
    max_length: int | None = None
    """The number of positions that exist; None if there is no limit."""
    max_distance: int | None = None
    """The distance beyond which `distance_terms` gives every key the same terms; None if all distances differ."""
    uses_positive_scores: ClassVar[bool] = False
    """Whether `score` depends on the positive part of the scores alone."""
    needs_every_key: bool = False
    """Whether `score` compares a query with every earlier key of its document, so that a mask may hide none."""
    couples_heads: bool = False
    """Whether the queries of one head depend on those of others, so that no head can be removed."""

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


@final
class ComposedPosition(Position):
    """Applies the seams of all parts one after another, each to the result of the previous part."""

    def __init__(self, *parts: Position) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        # the class overrides all of them, but a seam that no part changes need not be called
        self.overridden = frozenset().union(*(part.overridden for part in parts))
        self.needs_every_key = any(part.needs_every_key for part in parts)
        self.couples_heads = any(part.couples_heads for part in parts)
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

    def _parts(self) -> list[Position]:
        return list(self.parts)  # type: ignore[arg-type]
