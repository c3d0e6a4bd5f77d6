"""Locality-sensitive hashing by random rotations (Andoni et al. 2015; Kitaev et al. 2020, section 2)."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from manyformer.ops import counter_random

MAX_FACTOR = 128
"""Buckets of one rotation; for more, two rotations are used, or hashing would cost more than attention."""


def bucket_factors(buckets: int) -> tuple[int, ...]:
    """Factor `buckets` into none, one or two even numbers, the buckets of each rotation. Raises ValueError."""
    if buckets == 1:
        return ()
    if buckets < 1 or buckets % 2:
        raise ValueError(f"buckets ({buckets}) must be 1 or even: each rotation gives pairs of opposite buckets")
    if buckets <= MAX_FACTOR:
        return (buckets,)
    even = [factor for factor in range(2, int(buckets**0.5) + 1, 2) if buckets % (2 * factor) == 0]
    if not even:
        raise ValueError(f"buckets ({buckets}) above {MAX_FACTOR} must be a product of two even numbers")
    return even[-1], buckets // even[-1]


def rotations(
    seed: Int[Tensor, ""], rounds: int, heads: int, head_dim: int, factors: tuple[int, ...]
) -> tuple[Float[Tensor, "r h e _"], ...]:
    """Random directions for each round and head, half as many as buckets; the first rounds do not depend on `rounds`.

    Drawn from the normal distribution, as in the released code: only approximately rotations.
    """
    base_seed = counter_random.splitmix64(seed)
    directions = []
    for number, factor in enumerate(factors):
        directions.append(counter_random.counter_normal(base_seed + number, rounds, heads, head_dim, factor // 2))
    return tuple(directions)


def buckets(
    x: Float[Tensor, "b h l e"], rotations: tuple[Float[Tensor, "r h e _"], ...]
) -> Int[Tensor, "r b h l"] | None:
    """The bucket of each token in each round: the nearest direction or its opposite; None for a single bucket.

    With two rotations, the second counts in units of the first one's buckets.
    """
    bucket = None
    unit = 1
    for directions in rotations:
        rotated = torch.einsum("bhle,rhef->rbhlf", x, directions.to(x.dtype))
        nearest = rotated.abs().argmax(-1, keepdim=True)
        opposite = rotated.gather(-1, nearest) < 0
        index = (nearest + opposite * directions.shape[-1]).squeeze(-1) * unit
        bucket = index if bucket is None else bucket + index
        unit *= 2 * directions.shape[-1]
    return bucket
