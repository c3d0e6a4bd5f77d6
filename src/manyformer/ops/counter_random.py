"""Counter-based random numbers: functions of a seed and an index, without generator state, equal on every device.

A module that draws new numbers in every step, or a longer prefix of the same draws, stores a seed and a counter.
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
