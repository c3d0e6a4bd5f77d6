"""Positions that depend on nothing but how far a key is from its query."""

from typing import NamedTuple

from jaxtyping import Float, Int
from torch import Tensor

from manyformer.core import Place, Plain


class ByDistance(NamedTuple):
    """What a position does as a function of the distance r = j - i of key j from query i, negative in the past.

    It adds bias[r] + q keys[r] to a score, nothing of it scaled any more, and values[r] to what a key gives. Row 0 is
    r = -back and the last row r = ahead; they also stand for all that is farther.
    """

    back: int
    ahead: int
    bias: Float[Tensor, "#h r"] | None = None
    keys: Float[Tensor, "#h r e"] | None = None
    values: Float[Tensor, "#h r f"] | None = None


def distance(at: Place, of: Place) -> Int[Tensor, "#b l s"]:
    """How far each key is ahead of each query; one row serves all where they agree."""
    if isinstance(at.layout, Plain) and isinstance(of.layout, Plain):
        return of.pos[:1, None, :] - at.pos[:1, :, None]
    return of.pos[:, None, :] - at.pos[:, :, None]
