"""Scalings of rotary frequencies, for contexts longer than those a model was trained on.

Each is a record that maps the frequencies of channel pairs (radians per token) to scaled ones. `factor` is how many
times longer the context becomes, `original_length` the length that the model was trained on.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal, final

import torch
from jaxtyping import Float64
from torch import Tensor

from manyformer.system.devices import float64_device


def rotary_frequencies(width: int, base: float) -> Float64[Tensor, " p"]:
    """The frequency of each pair of `width` channels: base^(-2k / width) (Su et al. 2021, section 3.2.2)."""
    return base ** -(torch.arange(0, width, 2, dtype=torch.float64, device="cpu") / width)


class RotaryScaling(ABC):
    """Frequencies that are the same for every token, and a factor `attention_factor` on queries and keys."""

    @abstractmethod
    def frequencies(self, width: int, base: float) -> Float64[Tensor, " p"]:
        """The scaled frequencies of the pairs of `width` channels."""

    @property
    def attention_factor(self) -> float:
        """The factor that rotated channels are multiplied by; scores change by its square."""
        return 1.0

    @property
    def longest(self) -> int | None:
        """The longest text that the frequencies are for; None if there is no limit."""
        return None


@final
@dataclass(frozen=True)
class LinearRotaryScaling(RotaryScaling):
    """All angles divided by `factor` (Chen et al. 2023, Position Interpolation, arXiv:2306.15595).

    It needs some training at the new length, because the angles of distances seen in training change.
    """

    factor: float

    def __post_init__(self) -> None:
        _check_scaling("LinearRotaryScaling", self.factor)

    def frequencies(self, width: int, base: float) -> Float64[Tensor, " p"]:
        return rotary_frequencies(width, base) / self.factor


@final
@dataclass(frozen=True)
class NTKRotaryScaling(RotaryScaling):
    """The base times factor^(width / (width - 2)): divides the lowest frequency by `factor` and keeps the highest.

    "NTK-aware scaling" by bloc97 (2023), described by Peng et al. (2023, arXiv:2309.00071), section 3.1.
    """

    factor: float

    def __post_init__(self) -> None:
        _check_scaling("NTKRotaryScaling", self.factor)

    def frequencies(self, width: int, base: float) -> Float64[Tensor, " p"]:
        return rotary_frequencies(width, base * self.factor ** (width / max(1, width - 2)))


@final
@dataclass(frozen=True)
class DynamicNTKRotaryScaling:
    """NTK scaling by the current length: with n tokens the factor is factor * n / original_length - (factor - 1).

    Up to `original_length` tokens nothing changes. By emozilla (2023), described by Peng et al. (2023), section 3.3.
    The frequencies depend on the query, so keys cannot be rotated before they are cached:
    `manyformer.kernels.DynamicRotaryKernel` caches unrotated keys.
    """

    factor: float
    original_length: int

    def __post_init__(self) -> None:
        _check_scaling("DynamicNTKRotaryScaling", self.factor, self.original_length)

    def frequencies(self, width: int, base: float, length: Tensor) -> Float64[Tensor, "*n p"]:
        """The frequencies for a query that is the last of `length` tokens, where there is float64."""
        length = length.to(float64_device(length.device)).double().clamp(min=self.original_length)
        length_factor = self.factor * length / self.original_length - (self.factor - 1)
        bases = base * length_factor ** (width / max(1, width - 2))
        exponents = torch.arange(0, width, 2, dtype=torch.float64, device=length.device) / width
        return bases[..., None] ** -exponents


@final
@dataclass(frozen=True)
class YaRNRotaryScaling(RotaryScaling):
    """Divides low frequencies by `factor` and keeps high ones, with a linear ramp between them (Peng et al. 2023).

    arXiv:2309.00071, section 3.2, and the temperature of section 3.4 as `attention_factor` = 0.1 ln(factor) + 1.
    Frequencies are high for pairs with more than `beta_fast` rotations within `original_length` tokens, low for those
    with fewer than `beta_slow`. The ramp is linear in the index of the pair, as in the authors' code and in released
    checkpoints, with ends rounded to whole pairs, in gpt-oss unrounded; with `ramp="turns"` it is linear in the number
    of rotations, as in the paper. `magnitude` replaces the temperature.
    """

    factor: float
    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    ramp: Literal["pairs", "unrounded-pairs", "turns"] = "pairs"
    magnitude: float | None = None

    def __post_init__(self) -> None:
        _check_scaling("YaRNRotaryScaling", self.factor, self.original_length)
        if self.beta_fast <= self.beta_slow or self.beta_slow <= 0:
            raise ValueError(
                f"YaRNRotaryScaling: beta_fast ({self.beta_fast}) must be greater than beta_slow ({self.beta_slow}), "
                "and beta_slow greater than 0"
            )
        if self.ramp not in ("pairs", "unrounded-pairs", "turns"):
            raise ValueError(
                f"YaRNRotaryScaling: ramp ('{self.ramp}') must be pairs or unrounded-pairs (as in code), or turns (as "
                "in the paper)"
            )

    @property
    def attention_factor(self) -> float:
        return yarn_temperature(self.factor) if self.magnitude is None else self.magnitude

    def frequencies(self, width: int, base: float) -> Float64[Tensor, " p"]:
        unscaled = rotary_frequencies(width, base)
        interpolation = self._ramp_by_turns(unscaled) if self.ramp == "turns" else self._ramp_by_pairs(width, base)
        return unscaled * (1 - interpolation) + unscaled / self.factor * interpolation

    def _ramp_by_turns(self, unscaled: Float64[Tensor, " p"]) -> Float64[Tensor, " p"]:
        turns = unscaled * self.original_length / (2 * math.pi)
        return 1 - ((turns - self.beta_slow) / (self.beta_fast - self.beta_slow)).clamp(0, 1)

    def _ramp_by_pairs(self, width: int, base: float) -> Float64[Tensor, " p"]:
        def pair_of(turns: float) -> float:
            """The fractional index of the pair with this number of rotations within `original_length` tokens."""
            return width * math.log(self.original_length / (2 * math.pi * turns)) / (2 * math.log(base))

        ramp_start, ramp_stop = pair_of(self.beta_fast), pair_of(self.beta_slow)
        if self.ramp == "pairs":
            ramp_start, ramp_stop = math.floor(ramp_start), math.ceil(ramp_stop)
        ramp_start, ramp_stop = max(0, ramp_start), min(width - 1, ramp_stop)
        # if both fall on one pair the ramp is a step, of the same width as in the authors' code
        ramp_width = ramp_stop - ramp_start or 0.001
        pair = torch.arange(width // 2, dtype=torch.float64, device="cpu")
        return ((pair - ramp_start) / ramp_width).clamp(0, 1)


@final
@dataclass(frozen=True)
class Llama3RotaryScaling(RotaryScaling):
    """Divides low frequencies by `factor` and keeps high ones, as Llama 3.1 (Llama Team 2024, arXiv:2407.21783).

    Frequencies are high for pairs with more than `high` rotations within `original_length` tokens, low for those with
    fewer than `low`, and between them interpolated linearly in the number of rotations.
    """

    factor: float
    original_length: int
    low: float = 1.0
    high: float = 4.0

    def __post_init__(self) -> None:
        _check_scaling("Llama3RotaryScaling", self.factor, self.original_length)
        if not 0 < self.low < self.high:
            raise ValueError(f"Llama3RotaryScaling: low ({self.low}) must be above 0 and below high ({self.high})")

    def frequencies(self, width: int, base: float) -> Float64[Tensor, " p"]:
        unscaled = rotary_frequencies(width, base)
        turns = unscaled * self.original_length / (2 * math.pi)
        unchanged = ((turns - self.low) / (self.high - self.low)).clamp(0, 1)
        return unscaled * (unchanged + (1 - unchanged) / self.factor)


@final
@dataclass(frozen=True)
class LongRoPERotaryScaling(RotaryScaling):
    """Each frequency divided by a number of its own, `divisors[k]` for pair k (Ding et al. 2024, arXiv:2402.13753).

    Section 3: the divisors are found by a search for each model and length, and come with its weights; models that have
    others for texts up to `original_length` are two positions, of which that one refuses longer texts with
    `is_original`: keys that are cached under one set are wrong under the other. `attention_factor` is sqrt(1 +
    ln(factor) / ln(original_length)), as in released models (Phi-3). Raises ValueError for another number of divisors
    than pairs.
    """

    divisors: tuple[float, ...]
    factor: float
    original_length: int
    is_original: bool = False

    def __post_init__(self) -> None:
        _check_scaling("LongRoPERotaryScaling", self.factor, self.original_length)
        if self.original_length < 2 or not all(0 < divisor < math.inf for divisor in self.divisors):
            raise ValueError(
                f"LongRoPERotaryScaling: divisors ({self.divisors}) must be above 0, and original_length "
                f"({self.original_length}) at least 2"
            )

    @property
    def attention_factor(self) -> float:
        return math.sqrt(1 + math.log(self.factor) / math.log(self.original_length))

    @property
    def longest(self) -> int | None:
        return self.original_length if self.is_original else None

    def frequencies(self, width: int, base: float) -> Float64[Tensor, " p"]:
        unscaled = rotary_frequencies(width, base)
        if len(self.divisors) != len(unscaled):
            raise ValueError(f"LongRoPERotaryScaling: {len(self.divisors)} divisors, but {len(unscaled)} pairs")
        return unscaled / unscaled.new_tensor(self.divisors)


def yarn_temperature(factor: float) -> float:
    """0.1 ln(factor) + 1, by which queries and keys grow with the context (Peng et al. 2023, section 3.4)."""
    return 0.1 * math.log(factor) + 1


def _check_scaling(name: str, factor: float, original_length: int = 1) -> None:
    if not (math.isfinite(factor) and factor >= 1):
        raise ValueError(
            f"{name}: factor ({factor}) must be at least 1, the ratio of the new context length to the original one"
        )
    if original_length < 1:
        raise ValueError(f"{name}: original_length ({original_length}) must be at least 1, the length used in training")
