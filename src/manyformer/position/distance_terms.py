"""Positions that depend on nothing but how far a key is from its query."""

from typing import NamedTuple

from jaxtyping import Float, Int
from torch import Tensor

from manyformer.core import ContiguousLayout, TokenPositions


class DistanceTerms(NamedTuple):
    """What a position does as a function of the distance r = j - i of key j from query i, negative in the past.

    It adds bias[r] + (q + turn) keys[r] to a score, nothing of it scaled any more, and values[r] to what a key gives.
    Row 0 is r = -back and the last row r = ahead; they also stand for all that is farther.
    """

    back: int
    ahead: int
    bias: Float[Tensor, "#h r"] | None = None
    keys: Float[Tensor, "#h r e"] | None = None
    values: Float[Tensor, "#h r f"] | None = None
    turn: Float[Tensor, "h e"] | None = None


def distance(query_positions: TokenPositions, key_positions: TokenPositions) -> Int[Tensor, "#b l s"]:
    """How far each key is ahead of each query; one row serves all where they agree."""
    if isinstance(query_positions.layout, ContiguousLayout) and isinstance(key_positions.layout, ContiguousLayout):
        return key_positions.position_ids[:1, None, :] - query_positions.position_ids[:1, :, None]
    return key_positions.position_ids[:, None, :] - query_positions.position_ids[:, :, None]


def toeplitz_view(each: Float[Tensor, "*b l n"], keys: int) -> Float[Tensor, "*b l s"]:
    """Numbers by distance as numbers by key, where queries and keys each stand side by side: two views, no index.

    The n = l + `keys` - 1 columns are the distances from that of the first key to the last query on, rising. Entry
    (i, j) of the result is (i, l - 1 - i + j) of `each`: all distances are there, so nothing wraps round.
    """
    queries, columns = each.shape[-2:]
    if queries == 1:
        return each
    # a row of the result begins one column earlier than the row above it
    flat = each.flatten(-2)[..., queries - 1 : queries * columns - 1]
    return flat.view(*flat.shape[:-1], queries, columns - 1)[..., :keys]


def broadcast_pairs(row: Float[Tensor, "*b n"], queries: int) -> Float[Tensor, "*b l s"]:
    """`toeplitz_view` for queries that all have the same numbers."""
    return row.unfold(-1, row.shape[-1] - queries + 1, 1).flip(-2)
