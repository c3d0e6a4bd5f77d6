"""Other angles for a rotary position, so that a model reads more tokens than it was trained on.

Each is a small record that turns the rates at which channel pairs turn (radians per token) into others. `factor` is how
many times longer the context becomes, `original` the length that the model was trained on.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal, final

import torch
from jaxtyping import Float64
from torch import Tensor


def rotary_frequencies(width: int, base: float) -> Float64[Tensor, " p"]:
    """The rate of each pair of `width` channels: base^(-2k / width) (Su et al. 2021, section 3.2.2)."""
    return base ** -(torch.arange(0, width, 2, dtype=torch.float64, device="cpu") / width)


class RotaryScaling(ABC):
    """A change of the rates that is the same for every token, and a factor `gain` on queries and keys."""

    @abstractmethod
    def rates(self, width: int, base: float) -> Float64[Tensor, " p"]:
        """The changed rates of the pairs of `width` channels."""

    @property
    def gain(self) -> float:
        """What turned channels are multiplied by; scores change by its square."""
        return 1.0


@final
@dataclass(frozen=True)
class LinearRotaryScaling(RotaryScaling):
    """All angles divided by `factor` (Chen et al. 2023, Position Interpolation, arXiv:2306.15595).

    It wants some training at the new length: distances that the model knows become others.
    """

    factor: float

    def __post_init__(self) -> None:
        _check("Linear", self.factor)

    def rates(self, width: int, base: float) -> Float64[Tensor, " p"]:
        return rotary_frequencies(width, base) / self.factor


@final
@dataclass(frozen=True)
class NTKRotaryScaling(RotaryScaling):
    """The base times factor^(width / (width - 2)): the slowest pair turns `factor` times slower, the fastest as ever.

    "NTK-aware scaling" by bloc97 (2023), described by Peng et al. (2023, arXiv:2309.00071), section 3.1.
    """

    factor: float

    def __post_init__(self) -> None:
        _check("NTK", self.factor)

    def rates(self, width: int, base: float) -> Float64[Tensor, " p"]:
        return rotary_frequencies(width, base * self.factor ** (width / max(1, width - 2)))


@final
@dataclass(frozen=True)
class DynamicNTKRotaryScaling:
    """NTK scaling that follows the length so far: with n tokens the factor is factor * n / original - (factor - 1).

    Up to `original` tokens nothing changes. By emozilla (2023), described by Peng et al. (2023), section 3.3. The rates
    depend on the query, so keys cannot be turned once and for all: `manyformer.kernels.DynamicRotary` does it right.
    """

    factor: float
    original: int

    def __post_init__(self) -> None:
        _check("DynamicNTK", self.factor, self.original)

    def rates(self, width: int, base: float, length: Tensor) -> Float64[Tensor, "*n p"]:
        """The rates for a query that is the last of `length` tokens."""
        stretch = self.factor * length.double().clamp(min=self.original) / self.original - (self.factor - 1)
        bases = base * stretch ** (width / max(1, width - 2))
        power = torch.arange(0, width, 2, dtype=torch.float64, device=length.device) / width
        return bases[..., None] ** -power


@final
@dataclass(frozen=True)
class YaRNRotaryScaling(RotaryScaling):
    """Slow pairs are slowed down by `factor`, fast ones are left alone, with a ramp between (Peng et al. 2023).

    arXiv:2309.00071, section 3.2, and the temperature of section 3.4 as `gain` = 0.1 ln(factor) + 1. Pairs that turn
    more than `fast` times within `original` tokens count as fast, less than `slow` times as slow. The ramp is linear in
    the number of the pair, as in the authors' code and in every released checkpoint; with `ramp="turns"` it is linear
    in the number of turns, as the paper writes it.
    """

    factor: float
    original: int
    fast: float = 32.0
    slow: float = 1.0
    ramp: Literal["pairs", "turns"] = "pairs"

    def __post_init__(self) -> None:
        _check("YaRN", self.factor, self.original)
        if self.fast <= self.slow or self.slow <= 0:
            raise ValueError(
                f"YaRNRotaryScaling: fast ({self.fast}) must be greater than slow ({self.slow}), and that than 0"
            )
        if self.ramp not in ("pairs", "turns"):
            raise ValueError(
                f"YaRNRotaryScaling: ramp ('{self.ramp}') must be pairs (as in the code) or turns (as in the paper)"
            )

    @property
    def gain(self) -> float:
        return 0.1 * math.log(self.factor) + 1

    def rates(self, width: int, base: float) -> Float64[Tensor, " p"]:
        plain = rotary_frequencies(width, base)
        slowed = self._by_turns(plain) if self.ramp == "turns" else self._by_pairs(width, base)
        return plain * (1 - slowed) + plain / self.factor * slowed

    def _by_turns(self, plain: Float64[Tensor, " p"]) -> Float64[Tensor, " p"]:
        turns = plain * self.original / (2 * math.pi)
        return 1 - ((turns - self.slow) / (self.fast - self.slow)).clamp(0, 1)

    def _by_pairs(self, width: int, base: float) -> Float64[Tensor, " p"]:
        def pair_of(turns: float) -> float:
            """The number of the pair, not a whole one, that turns so often."""
            return width * math.log(self.original / (2 * math.pi * turns)) / (2 * math.log(base))

        first = max(0, math.floor(pair_of(self.fast)))
        last = min(width - 1, math.ceil(pair_of(self.slow)))
        # where both fall on one pair the ramp is a step; their width is the authors'
        span = last - first or 0.001
        pair = torch.arange(width // 2, dtype=torch.float64, device="cpu")
        return ((pair - first) / span).clamp(0, 1)


def _check(name: str, factor: float, original: int = 1) -> None:
    if not (math.isfinite(factor) and factor >= 1):
        raise ValueError(
            f"{name}: factor ({factor}) must be at least 1: it is how many times longer the context becomes"
        )
    if original < 1:
        raise ValueError(f"{name}: original ({original}) must be at least 1: the length that the model was trained on")
