"""Locality-sensitive hashing by random rotations (Andoni et al. 2015; Kitaev et al. 2020, section 2).

Rotations are functions of a seed and a counter, without generator state, equal on every device: a module that draws new
ones in every step, or more rounds after the same first ones, stores a seed and a counter alone.
"""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

# Steele et al. 2014, Fast Splittable Pseudorandom Number Generators: the increment and the two factors of SplitMix64,
# as signed 64-bit integers, which are torch's.
GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
"""The step of the counter: 2^64 divided by the golden ratio, as a signed number."""

FACTORS = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))
"""The factors of two rounds of mixing, as signed numbers."""

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
    base_seed = splitmix64(seed)
    directions = []
    for number, factor in enumerate(factors):
        directions.append(counter_normal(base_seed + number, rounds, heads, head_dim, factor // 2))
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


def splitmix64(number: Int[Tensor, "*n"]) -> Int[Tensor, "*n"]:
    """64 pseudorandom bits for each integer: SplitMix64, products modulo 2^64."""
    x = number * GOLDEN
    for shift, factor in zip((30, 27), FACTORS):
        x = (x ^ _shift_right(x, shift)) * factor
    return x ^ _shift_right(x, 31)


def counter_normal(seed: Int[Tensor, ""], *shape: int) -> Float[Tensor, "*shape"]:
    """Standard normal numbers in float32 (Box and Muller 1958); a smaller shape gives a prefix of a larger one."""
    bits = splitmix64(torch.arange(1, math.prod(shape) + 1, device=seed.device) + splitmix64(seed))
    # 24 and 29 bits; the radius is never 0, whose logarithm is -inf
    radius = ((bits & 0xFFFFFF).float() + 0.5) / (1 << 24)
    angle = _shift_right(bits, 35).float() * (2 * math.pi / (1 << 29))
    return ((-2 * radius.log()).sqrt() * angle.cos()).view(shape)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical right shift, which torch lacks for signed integers."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
