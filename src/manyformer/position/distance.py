"""Positions that depend on nothing but how far a key is from its query."""

from typing import NamedTuple

from jaxtyping import Float, Int
from torch import Tensor

from manyformer.core import Place, Plain


class ByDistance(NamedTuple):
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


def distance(at: Place, of: Place) -> Int[Tensor, "#b l s"]:
    """How far each key is ahead of each query; one row serves all where they agree."""
    if isinstance(at.layout, Plain) and isinstance(of.layout, Plain):
        return of.pos[:1, None, :] - at.pos[:1, :, None]
    return of.pos[:, None, :] - at.pos[:, :, None]


def along(each: Float[Tensor, "*b l n"], keys: int) -> Float[Tensor, "*b l s"]:
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


def each_pair(row: Float[Tensor, "*b n"], queries: int) -> Float[Tensor, "*b l s"]:
    """`along` for queries that all have the same numbers."""
    return row.unfold(-1, row.shape[-1] - queries + 1, 1).flip(-2)
