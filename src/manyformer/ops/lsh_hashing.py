"""Locality-sensitive hashing by random rotations (Andoni et al. 2015; Kitaev et al. 2020, section 2)."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from manyformer.ops import counter_random

MAX_FACTOR = 128
"""Buckets that one rotation tells apart; above, two rotations do, or hashing would cost more than attention."""


def bucket_factors(buckets: int) -> tuple[int, ...]:
    """Of which even numbers of buckets so many are the product: of none, one or two. Raises ValueError."""
    if buckets == 1:
        return ()
    if buckets < 1 or buckets % 2:
        raise ValueError(f"buckets ({buckets}) must be 1 or even: each rotation gives pairs of opposite ones")
    if buckets <= MAX_FACTOR:
        return (buckets,)
    even = [first for first in range(2, int(buckets**0.5) + 1, 2) if buckets % (2 * first) == 0]
    if not even:
        raise ValueError(f"buckets ({buckets}) above {MAX_FACTOR} must be a product of two even numbers")
    return even[-1], buckets // even[-1]


def rotations(
    seed: Int[Tensor, ""], rounds: int, heads: int, key: int, factors: tuple[int, ...]
) -> tuple[Float[Tensor, "r h e _"], ...]:
    """Random directions for each round and head, half as many as buckets; the first rounds are the same for any number.

    Drawn from the normal distribution, as in the released code: only nearly rotations.
    """
    base, found = counter_random.splitmix64(seed), []
    for number, factor in enumerate(factors):
        found.append(counter_random.counter_normal(base + number, rounds, heads, key, factor // 2))
    return tuple(found)


def buckets(
    x: Float[Tensor, "b h l e"], rotations: tuple[Float[Tensor, "r h e _"], ...]
) -> Int[Tensor, "r b h l"] | None:
    """The bucket of each token in each round: which direction, or its opposite, lies nearest; None where all are one.

    With two rotations, the second counts in units of the first one's buckets.
    """
    found, unit = None, 1
    for directions in rotations:
        turned = torch.einsum("bhle,rhef->rbhlf", x, directions.to(x.dtype))
        nearest = turned.abs().argmax(-1, keepdim=True)
        opposite = turned.gather(-1, nearest) < 0
        index = (nearest + opposite * directions.shape[-1]).squeeze(-1) * unit
        found = index if found is None else found + index
        unit *= 2 * directions.shape[-1]
    return found
