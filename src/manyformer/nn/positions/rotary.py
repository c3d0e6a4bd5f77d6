"""Rotary positions: queries and keys rotated by their positions; scalings of the frequencies for longer contexts."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal, final

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from manyformer.nn.core import PADDING_SEGMENT, ContiguousLayout, StepLayout, TokenPositions
from manyformer.nn.positions.position import Position
from manyformer.nn.runtime.device_reads import ConstantTensor, is_readable
from manyformer.nn.runtime.devices import float64_device
from manyformer.nn.runtime.module_places import SharedTable
from manyformer.nn.runtime.torch_internals import is_traced, real_tensors


def rotary_frequencies(width: int, base: float) -> Float64[Tensor, " p"]:
    """The frequency of each pair of `width` channels: base^(-2k / width) (Su et al. 2021, section 3.2.2)."""
    # float64: an error of a frequency grows with the position that it is multiplied with
    return base ** -(torch.arange(0, width, 2, dtype=torch.float64, device="cpu") / width)


class RotaryScaling(ABC):
    """Frequencies that are the same for every token, and a factor `attention_factor` on queries and keys.

    A record that maps the frequencies of channel pairs (radians per token) to scaled ones. `factor` is how many times
    longer the context becomes, `original_length` the length that the model was trained on."""

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
    `manyformer.nn.DynamicRotaryKernel` caches unrotated keys.
    """

    factor: float
    original_length: int

    def __post_init__(self) -> None:
        _check_scaling("DynamicNTKRotaryScaling", self.factor, self.original_length)

    def frequencies(self, width: int, base: float, length: Tensor) -> Float64[Tensor, "*n p"]:
        """The frequencies for a query that is the last of `length` tokens, where there is float64."""
        # shorter texts keep the frequencies of training
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
        if self.magnitude is None:
            return yarn_temperature(self.factor)
        return self.magnitude

    def frequencies(self, width: int, base: float) -> Float64[Tensor, " p"]:
        unscaled = rotary_frequencies(width, base)
        if self.ramp == "turns":
            interpolation = self._ramp_by_turns(unscaled)
        else:
            interpolation = self._ramp_by_pairs(width, base)
        return unscaled * (1 - interpolation) + unscaled / self.factor * interpolation

    def _ramp_by_turns(self, unscaled: Float64[Tensor, " p"]) -> Float64[Tensor, " p"]:
        turns = unscaled * self.original_length / (2 * math.pi)
        return 1 - ((turns - self.beta_slow) / (self.beta_fast - self.beta_slow)).clamp(0, 1)

    def _ramp_by_pairs(self, width: int, base: float) -> Float64[Tensor, " p"]:
        def pair_of(turns: float) -> float:
            """The fractional index of the pair with this number of rotations within `original_length` tokens."""
            return width * math.log(self.original_length / (2 * math.pi * turns)) / (2 * math.log(base))

        ramp_start = pair_of(self.beta_fast)
        ramp_stop = pair_of(self.beta_slow)
        if self.ramp == "pairs":
            ramp_start = math.floor(ramp_start)
            ramp_stop = math.ceil(ramp_stop)
        ramp_start = max(0, ramp_start)
        ramp_stop = min(width - 1, ramp_stop)
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
        if self.is_original:
            return self.original_length
        return None

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


RotaryPairing = Literal["interleaved", "halves"]
"""Which channels form a pair: 2k and 2k + 1 (RoFormer, GPT-J), or k and k + width / 2 (Llama, GPT-NeoX)."""

UNROTATED = ConstantTensor((1.0, 0.0), torch.float64)
"""Cosine and sine of a pair that is not rotated."""

MAX_TABLE_ROWS = 1 << 16
"""The table of cosines and sines ends at this position; beyond it, they are computed at every call."""


@final
class RotaryPosition(Position):
    """Rotates each channel pair of queries and keys by position x frequency (Su et al. 2021, RoFormer, section 3.2).

    `width` is that of a head, of which the first `rotated` channels (all by default) are rotated at the frequencies
    `base`^(-2k / rotated), changed by `scaling`. Cosines and sines are taken in float64 and multiplied in float32 at
    least. Layers that are given the same position share its table. Raises ValueError if widths are odd or do not fit,
    and, on a CPU or for contiguous rows, for a text longer than the scaling allows.
    """

    def __init__(
        self,
        width: int,
        *,
        rotated: int | None = None,
        pairs: RotaryPairing = "interleaved",
        base: float = 10_000.0,
        scaling: RotaryScaling | None = None,
    ) -> None:
        super().__init__()
        rotated = width if rotated is None else rotated
        check_widths(width, rotated, pairs)
        if isinstance(scaling, DynamicNTKRotaryScaling):
            raise ValueError(
                "RotaryPosition rotates keys before they are cached, but DynamicNTKRotaryScaling changes their angles "
                "with every later query; use DynamicRotaryKernel instead"
            )
        self.width = width
        self.rotated = rotated
        self.pairs = pairs
        self.base = base
        self.scaling = scaling
        self.max_length = None if scaling is None else scaling.longest
        with real_tensors():
            if scaling is None:
                frequencies = rotary_frequencies(rotated, base)
            else:
                frequencies = scaling.frequencies(rotated, base)
            self._frequencies = ConstantTensor(tuple(frequencies.tolist()), torch.float64)
        self._cache = SharedTable()

    def query(self, q: Float[Tensor, "b h l e"], positions: TokenPositions) -> Float[Tensor, "b h l e"]:
        return self._rotate(q, positions)

    def key(self, k: Float[Tensor, "b g l e"], positions: TokenPositions) -> Float[Tensor, "b g l e"]:
        return self._rotate(k, positions)

    def _rotate(self, x: Float[Tensor, "b h l e"], positions: TokenPositions) -> Float[Tensor, "b h l e"]:
        # asked once, not by every function that has to know
        traced = is_traced()
        return rotate(x, self._table_rows(positions, x, traced=traced), self.pairs, traced=traced)

    def extra_repr(self) -> str:
        return f"{self.width}, rotated={self.rotated}, pairs={self.pairs}, base={self.base:g}, scaling={self.scaling}"

    def _table_rows(self, positions: TokenPositions, x: Tensor, *, traced: bool) -> Float[Tensor, "*b l p 2"]:
        """Cosine and sine of every token and pair; without a batch axis if all rows have the same positions."""
        if x.shape[-1] != self.width:
            raise ValueError(
                f"RotaryPosition was built for heads of width {self.width}, these have {x.shape[-1]} channels"
            )
        dtype = torch.promote_types(x.dtype, torch.float32)
        if isinstance(positions.layout, ContiguousLayout):
            start = positions.layout.start
            stop = positions.layout.start + x.shape[2]
            self._check_length(stop)
            table = self._table_up_to(stop, x.device, dtype, traced=traced)
            if table is None:
                return self._compute_table(positions.position_ids[:1], dtype)[0]
            return table[start:stop]
        if isinstance(positions.layout, StepLayout):
            table = self._table_up_to(positions.layout.position_limit, x.device, dtype, traced=traced)
            if table is not None:
                return table[positions.position_ids][:, None]
        elif is_readable(positions.position_ids) and positions.position_ids.numel():
            if self.max_length is not None:
                is_padding = positions.segment_ids == PADDING_SEGMENT
                self._check_length(int(positions.position_ids.masked_fill(is_padding, 0).max()) + 1)
            table = self._table_up_to(int(positions.position_ids.max()) + 1, x.device, dtype, traced=traced)
            if table is not None:
                return table[positions.position_ids][:, None]
        return self._compute_table(positions.position_ids, dtype)[:, None]

    def _check_length(self, length: int) -> None:
        """Raise ValueError for a text that the scaling is not for, which may have grown from a state."""
        if self.max_length is not None and length > self.max_length:
            raise ValueError(
                f"{length} tokens are more than this model allows: {self.scaling} is for {self.max_length}"
            )

    def _table_up_to(self, length: int, device: torch.device, dtype: torch.dtype, *, traced: bool) -> Tensor | None:
        """The table of at least `length` positions, extended if necessary; None beyond `MAX_TABLE_ROWS`."""
        # a table that was made before has numbers, which a graph that is recorded cannot take for its own
        if traced and not torch.compiler.is_dynamo_compiling():
            return None
        table = self._cache.table
        if table is not None and length <= table.shape[0] and table.device == device and table.dtype == dtype:
            return table
        if length > MAX_TABLE_ROWS or torch.compiler.is_compiling():
            return None
        # outside inference mode, whose tensors could not be used in training later
        with torch.inference_mode(mode=False):
            table = self._compute_table(torch.arange(min(2 * length, MAX_TABLE_ROWS), device=device), dtype)
        # returned from here, not read again: another thread may replace it by a shorter one
        self._cache.table = table
        return table

    def _compute_table(self, position_ids: Int[Tensor, "*l"], dtype: torch.dtype) -> Float[Tensor, "*l p 2"]:
        device = position_ids.device
        position_ids = position_ids.to(float64_device(device))
        frequencies = self._frequencies.on(position_ids.device)
        attention_factor = 1.0
        if self.scaling is not None:
            attention_factor = self.scaling.attention_factor
        unrotated_pairs = 0
        if self.pairs != "halves":
            unrotated_pairs = (self.width - self.rotated) // 2
        table = rotation_table(
            position_ids[..., None] * frequencies, attention_factor=attention_factor, unrotated_pairs=unrotated_pairs
        )
        return table.to(dtype).to(device)


def check_widths(width: int, rotated: int, pairs: str) -> None:
    """Raise ValueError if `rotated` of `width` channels cannot be rotated in pairs."""
    if pairs not in ("interleaved", "halves"):
        raise ValueError(f"pairs ('{pairs}') must be interleaved (RoFormer, GPT-J) or halves (Llama, GPT-NeoX)")
    if width % 2 or rotated % 2:
        raise ValueError(
            f"rotary positions rotate channel pairs: the width of a head ({width}) and rotated ({rotated}) must be even"
        )
    if not 2 <= rotated <= width:
        raise ValueError(f"rotated ({rotated}) must be from 2 to the width of a head ({width})")


def rotation_table(
    angles: Float[Tensor, "*l p"], *, attention_factor: float = 1.0, unrotated_pairs: int = 0
) -> Float[Tensor, "*l q 2"]:
    """Cosine and sine times `attention_factor`, followed by (1, 0) for `unrotated_pairs` pairs."""
    table = attention_factor * torch.stack([angles.cos(), angles.sin()], dim=-1)
    if not unrotated_pairs:
        return table
    identity = UNROTATED.on(table.device).to(table.dtype).expand(*table.shape[:-2], unrotated_pairs, 2)
    return torch.cat([table, identity], dim=-2)


def rotate(
    x: Float[Tensor, "b h l e"], table: Float[Tensor, "*b l p 2"], pairs: RotaryPairing, *, traced: bool
) -> Float[Tensor, "b h l e"]:
    """Rotate every channel pair of `x` by the angle whose cosine and sine are in `table`.

    Nothing of `x` is saved for the gradient, which is the inverse rotation. Channels beyond the table are unchanged.
    `traced` is the answer of `is_traced`.
    """
    upcast = x.to(table.dtype)
    if pairs == "halves":
        return _rotate_halves(upcast, table).to(x.dtype)
    # compilers fuse the sums but cannot generate code for complex numbers; in eager mode these take a single pass
    if traced:
        y = _rotate_interleaved(upcast, table)
    else:
        y = _rotate_complex(upcast, table)
    return y.to(x.dtype)


def _rotate_complex(x: Tensor, table: Tensor) -> Tensor:
    if x.storage_offset() % 2 or not (x.is_contiguous() or _has_whole_pairs(x.stride())):
        x = x.clone(memory_format=torch.contiguous_format)
    product = torch.view_as_complex(x.view(*x.shape[:-1], -1, 2)) * torch.view_as_complex(table)
    return torch.view_as_real(product).flatten(-2)


def _has_whole_pairs(strides: tuple[int, ...]) -> bool:
    return strides[-1] == 1 and not any(step % 2 for step in strides[:-1])


def _rotate_interleaved(x: Tensor, table: Tensor) -> Tensor:
    a, b = x.view(*x.shape[:-1], -1, 2).unbind(-1)
    cos, sin = table.unbind(-1)
    return torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)


def _rotate_halves(x: Tensor, table: Tensor) -> Tensor:
    cos, sin = table.unbind(-1)
    half = cos.shape[-1]
    a, b, unrotated = torch.split(x, [half, half, x.shape[-1] - 2 * half], dim=-1)
    return torch.cat([torch.addcmul(a * cos, b, sin, value=-1), torch.addcmul(b * cos, a, sin), unrotated], dim=-1)


def convert_pairs(
    rows: Float[Tensor, "he ..."], heads: int, *, to: RotaryPairing, rotated: int | None = None
) -> Float[Tensor, "he ..."]:
    """The output rows of a query or key projection (weight or bias), reordered for the other pairing convention.

    A model of `RotaryPosition(pairs="halves")` with rows converted to "halves" computes what the model of interleaved
    pairs computes with the original rows, and vice versa. Raises ValueError if the rows do not divide into `heads`.
    """
    if rows.shape[0] % heads:
        raise ValueError(f"{rows.shape[0]} rows are not {heads} heads of equal width")
    width = rows.shape[0] // heads
    rotated = width if rotated is None else rotated
    check_widths(width, rotated, to)
    by_head = rows.view(heads, width, *rows.shape[1:])
    rotated_rows, unrotated_rows = torch.split(by_head, [rotated, width - rotated], dim=1)
    # interleaved is a table of pairs x 2 read row by row, halves the same table read column by column
    if to == "halves":
        shape = (rotated // 2, 2)
    else:
        shape = (2, rotated // 2)
    reordered = rotated_rows.reshape(heads, *shape, *rows.shape[1:]).transpose(1, 2).flatten(1, 2)
    return torch.cat([reordered, unrotated_rows], dim=1).flatten(0, 1)
