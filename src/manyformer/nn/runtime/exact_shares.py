"""Shares of whole numbers, such as 0.29 of 100, computed exactly: with the decimal that was written.

0.29 * 100 is 28.999999999999996 in floating point, and 1.2 * 50 / 4 a little more than 15 in float32; what is rounded
down or up from them is then one too few or too many.
"""

import math
from fractions import Fraction

from jaxtyping import Int
from torch import Tensor


def exact_share(share: float | Fraction) -> Fraction:
    """The decimal number that a float was written as: the shortest one that stands for it."""
    if isinstance(share, Fraction):
        return share
    # `repr` gives the shortest decimal that is this float
    return Fraction(repr(float(share)))


def floor_share(share: float | Fraction, total: int) -> int:
    """`share` times `total`, rounded down."""
    return math.floor(exact_share(share) * total)


def round_share(share: float | Fraction, total: int) -> int:
    """`share` times `total`, rounded to the nearest integer, and to the even one of two."""
    return round(exact_share(share) * total)


def ceil_share(share: float | Fraction, total: int) -> int:
    """`share` times `total`, rounded up."""
    return math.ceil(exact_share(share) * total)


def ceil_shares(share: float | Fraction, totals: Int[Tensor, "*n"]) -> Int[Tensor, "*n"]:
    """`ceil_share` of each of `totals`, which are below 2^31, on their device."""
    exact = exact_share(share)
    # the product with a total below 2^31 then fits into 64 bits
    if max(exact.numerator, exact.denominator) < 1 << 31:
        return -((-exact.numerator * totals) // exact.denominator)
    # a decimal of more digits than 64 bits can multiply
    counts = [ceil_share(exact, total) for total in totals.flatten().tolist()]
    return totals.new_tensor(counts).view_as(totals)
