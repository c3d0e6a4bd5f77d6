"""Random numbers as a function of their own number: no generator that is used up, the same on every device.

A part that draws anew at every step, or a larger number of the same draws when asked to, keeps a seed and counts.
"""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

# Steele et al. 2014, Fast Splittable Pseudorandom Number Generators: the increment and the two factors of SplitMix64,
# as the signed numbers that torch has.
GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
FACTORS = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))


def splitmix64(number: Int[Tensor, "*n"]) -> Int[Tensor, "*n"]:
    """64 bits that look random for each number: SplitMix64, products modulo 2^64."""
    x = number * GOLDEN
    for shift, factor in zip((30, 27), FACTORS):
        x = (x ^ _right(x, shift)) * factor
    return x ^ _right(x, 31)


def counter_normal(seed: Int[Tensor, ""], *shape: int) -> Float[Tensor, "*shape"]:
    """Standard normal numbers in float32, by Box and Muller 1958; the first ones are the same whatever the shape."""
    bits = splitmix64(torch.arange(1, math.prod(shape) + 1, device=seed.device) + splitmix64(seed))
    # 24 and 29 bits: never 0, whose logarithm there is none
    radius = ((bits & 0xFFFFFF).float() + 0.5) / (1 << 24)
    angle = _right(bits, 35).float() * (2 * math.pi / (1 << 29))
    return ((-2 * radius.log()).sqrt() * angle.cos()).view(shape)


def _right(x: Tensor, bits: int) -> Tensor:
    """The shift that fills up with zeros, which torch has not for signed numbers."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
