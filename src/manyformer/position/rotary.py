"""Rotary positions: queries and keys are rotated by their positions, so that products depend on the distance alone."""

from typing import Literal, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from manyformer.constant_tensors import ConstantTensor
from manyformer.core import PADDING_SEGMENT, ContiguousLayout, StepLayout, TokenPositions
from manyformer.device_reads import is_readable
from manyformer.position.position import Position
from manyformer.position.rotary_scaling import DynamicNTKRotaryScaling, RotaryScaling, rotary_frequencies
from manyformer.system.devices import float64_device

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
    least. One module may serve all layers of a model, which then share one table. Raises ValueError if widths are odd
    or do not fit, and, on a CPU or for contiguous rows, for a text longer than the scaling allows.
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
        self.width, self.rotated, self.pairs, self.base, self.scaling = width, rotated, pairs, base, scaling
        self.max_length = None if scaling is None else scaling.longest
        frequencies = rotary_frequencies(rotated, base) if scaling is None else scaling.frequencies(rotated, base)
        self._frequencies = ConstantTensor(tuple(frequencies.tolist()), torch.float64)
        # no buffer: converting the model to another dtype must not round the table
        self._table: Tensor | None = None

    def query(self, q: Float[Tensor, "b h l e"], positions: TokenPositions) -> Float[Tensor, "b h l e"]:
        return rotate(q, self._table_rows(positions, q), self.pairs)

    def key(self, k: Float[Tensor, "b g l e"], positions: TokenPositions) -> Float[Tensor, "b g l e"]:
        return rotate(k, self._table_rows(positions, k), self.pairs)

    def extra_repr(self) -> str:
        return f"{self.width}, rotated={self.rotated}, pairs={self.pairs}, base={self.base:g}, scaling={self.scaling}"

    def _table_rows(self, positions: TokenPositions, x: Tensor) -> Float[Tensor, "*b l p 2"]:
        """Cosine and sine of every token and pair; without a batch axis if all rows have the same positions."""
        if x.shape[-1] != self.width:
            raise ValueError(
                f"RotaryPosition was built for heads of width {self.width}, these have {x.shape[-1]} channels"
            )
        dtype = torch.promote_types(x.dtype, torch.float32)
        if isinstance(positions.layout, ContiguousLayout):
            start, stop = positions.layout.start, positions.layout.start + x.shape[2]
            self._check_length(stop)
            table = self._table_up_to(stop, x.device, dtype)
            return self._compute_table(positions.position_ids[:1], dtype)[0] if table is None else table[start:stop]
        if isinstance(positions.layout, StepLayout):
            table = self._table_up_to(positions.layout.position_limit, x.device, dtype)
            if table is not None:
                return table[positions.position_ids][:, None]
        elif is_readable(positions.position_ids) and positions.position_ids.numel():
            if self.max_length is not None:
                is_padding = positions.segment_ids == PADDING_SEGMENT
                self._check_length(int(positions.position_ids.masked_fill(is_padding, 0).max()) + 1)
            table = self._table_up_to(int(positions.position_ids.max()) + 1, x.device, dtype)
            if table is not None:
                return table[positions.position_ids][:, None]
        return self._compute_table(positions.position_ids, dtype)[:, None]

    def _check_length(self, length: int) -> None:
        """Raise ValueError for a text that the scaling is not for, which may have grown from a state."""
        if self.max_length is not None and length > self.max_length:
            raise ValueError(
                f"{length} tokens are more than this model allows: {self.scaling} is for {self.max_length}"
            )

    def _table_up_to(self, length: int, device: torch.device, dtype: torch.dtype) -> Tensor | None:
        """The table of at least `length` positions, extended if necessary; None beyond `MAX_TABLE_ROWS`."""
        table = self._table
        if table is not None and length <= table.shape[0] and table.device == device and table.dtype == dtype:
            return table
        if length > MAX_TABLE_ROWS or torch.compiler.is_compiling():
            return None
        # outside inference mode, whose tensors could not be used in training later
        with torch.inference_mode(mode=False):
            self._table = self._compute_table(torch.arange(min(2 * length, MAX_TABLE_ROWS), device=device), dtype)
        return self._table

    def _compute_table(self, position_ids: Int[Tensor, "*l"], dtype: torch.dtype) -> Float[Tensor, "*l p 2"]:
        device = position_ids.device
        position_ids = position_ids.to(float64_device(device))
        frequencies = self._frequencies.on(position_ids.device)
        attention_factor = 1.0 if self.scaling is None else self.scaling.attention_factor
        unrotated_pairs = 0 if self.pairs == "halves" else (self.width - self.rotated) // 2
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
    x: Float[Tensor, "b h l e"], table: Float[Tensor, "*b l p 2"], pairs: RotaryPairing
) -> Float[Tensor, "b h l e"]:
    """Rotate every channel pair of `x` by the angle whose cosine and sine are in `table`.

    Nothing of `x` is saved for the gradient, which is the inverse rotation. Channels beyond the table are unchanged.
    """
    upcast = x.to(table.dtype)
    if pairs == "halves":
        return _rotate_halves(upcast, table).to(x.dtype)
    # compilers fuse the sums but cannot generate code for complex numbers; in eager mode these take a single pass
    y = _rotate_interleaved(upcast, table) if torch.compiler.is_compiling() else _rotate_complex(upcast, table)
    return y.to(x.dtype)


def _rotate_complex(x: Tensor, table: Tensor) -> Tensor:
    if any(step % 2 for step in (*x.stride()[:-1], x.storage_offset())) or x.stride(-1) != 1:
        x = x.clone(memory_format=torch.contiguous_format)
    product = torch.view_as_complex(x.view(*x.shape[:-1], -1, 2)) * torch.view_as_complex(table)
    return torch.view_as_real(product).flatten(-2)


def _rotate_interleaved(x: Tensor, table: Tensor) -> Tensor:
    (a, b), (cos, sin) = x.view(*x.shape[:-1], -1, 2).unbind(-1), table.unbind(-1)
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
    shape = (rotated // 2, 2) if to == "halves" else (2, rotated // 2)
    reordered = rotated_rows.reshape(heads, *shape, *rows.shape[1:]).transpose(1, 2).flatten(1, 2)
    return torch.cat([reordered, unrotated_rows], dim=1).flatten(0, 1)
