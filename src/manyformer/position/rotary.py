"""Rotary positions: queries and keys turn with their positions, so that their product knows the distance alone."""

from typing import Literal, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from manyformer.core import ContiguousLayout, TokenPositions
from manyformer.position.position import Position
from manyformer.position.rotary_scaling import DynamicNTKRotaryScaling, RotaryScaling, rotary_frequencies

RotaryPairing = Literal["interleaved", "halves"]
"""Which channels turn together: 2k with 2k + 1 (RoFormer, GPT-J), or k with k + width / 2 (Llama, GPT-NeoX)."""

MOST_ROWS = 1 << 16
"""A table of angles is kept up to this position; beyond, angles are computed when they are needed."""


@final
class RotaryPosition(Position):
    """Each pair of channels of queries and keys turns by position x rate (Su et al. 2021, RoFormer, section 3.2).

    `width` is that of a head, of which the first `rotated` channels turn (all unless given) at the rates
    `base`^(-2k / rotated), changed by `scaling`. Cosines and sines are taken in float64 and multiplied in float32 at
    least. One module may serve all layers of a model, which then share one table. Raises ValueError where widths are
    odd or do not fit.
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
                "Rotary turns keys before they are cached, and DynamicNTK turns them otherwise for every later query; "
                "use the kernel DynamicRotary instead"
            )
        self.width, self.rotated, self.pairs, self.base, self.scaling = width, rotated, pairs, base, scaling
        found = rotary_frequencies(rotated, base) if scaling is None else scaling.rates(rotated, base)
        self._rates: tuple[float, ...] = tuple(found.tolist())
        # no buffer: converting the model to another type must not round the table
        self._table: Tensor | None = None

    def query(self, q: Float[Tensor, "b h l e"], positions: TokenPositions) -> Float[Tensor, "b h l e"]:
        return rotate(q, self._rows(positions, q), self.pairs)

    def key(self, k: Float[Tensor, "b g l e"], positions: TokenPositions) -> Float[Tensor, "b g l e"]:
        return rotate(k, self._rows(positions, k), self.pairs)

    def extra_repr(self) -> str:
        return f"{self.width}, rotated={self.rotated}, pairs={self.pairs}, base={self.base:g}, scaling={self.scaling}"

    def _rows(self, positions: TokenPositions, x: Tensor) -> Float[Tensor, "*b l p 2"]:
        """Cosine and sine for every token and pair, one axis short of `x` for rows that agree."""
        if x.shape[-1] != self.width:
            raise ValueError(f"Rotary was made for heads of width {self.width}, these have {x.shape[-1]} channels")
        kind = torch.promote_types(x.dtype, torch.float32)
        if isinstance(positions.layout, ContiguousLayout):
            first, last = positions.layout.start, positions.layout.start + x.shape[2]
            table = self._upto(last, x.device, kind)
            return self._compute(positions.position_ids[:1], kind)[0] if table is None else table[first:last]
        # a GPU would have to be waited for to know the largest position
        if x.device.type == "cpu" and positions.position_ids.numel():
            table = self._upto(int(positions.position_ids.max()) + 1, x.device, kind)
            if table is not None:
                return table[positions.position_ids][:, None]
        return self._compute(positions.position_ids, kind)[:, None]

    def _upto(self, last: int, device: torch.device, kind: torch.dtype) -> Tensor | None:
        """The table of at least `last` positions, made where there is none; None for positions beyond any table."""
        table = self._table
        if table is not None and last <= table.shape[0] and table.device == device and table.dtype == kind:
            return table
        if last > MOST_ROWS or torch.compiler.is_compiling():
            return None
        # outside inference mode, whose tensors could not be used in training later
        with torch.inference_mode(mode=False):
            self._table = self._compute(torch.arange(min(2 * last, MOST_ROWS), device=device), kind)
        return self._table

    def _compute(self, pos: Int[Tensor, "*l"], kind: torch.dtype) -> Float[Tensor, "*l p 2"]:
        pace = torch.tensor(self._rates, dtype=torch.float64, device=pos.device)
        gain = 1.0 if self.scaling is None else self.scaling.gain
        idle = 0 if self.pairs == "halves" else (self.width - self.rotated) // 2
        return rotation_table(pos[..., None] * pace, gain=gain, idle=idle).to(kind)


def check_widths(width: int, rotated: int, pairs: str) -> None:
    """Raise ValueError where `rotated` of `width` channels cannot turn in pairs."""
    if pairs not in ("interleaved", "halves"):
        raise ValueError(f"pairs ('{pairs}') must be interleaved (RoFormer, GPT-J) or halves (Llama, GPT-NeoX)")
    if width % 2 or rotated % 2:
        raise ValueError(
            f"rotary positions turn pairs: the width of a head ({width}) and rotated ({rotated}) must be even"
        )
    if not 2 <= rotated <= width:
        raise ValueError(f"rotated ({rotated}) must be from 2 to the width of a head ({width})")


def rotation_table(angle: Float[Tensor, "*l p"], *, gain: float = 1.0, idle: int = 0) -> Float[Tensor, "*l q 2"]:
    """Cosine and sine times `gain`; `idle` more pairs do not turn, and are not multiplied either."""
    found = gain * torch.stack([angle.cos(), angle.sin()], dim=-1)
    if not idle:
        return found
    still = found.new_tensor([1.0, 0.0]).expand(*found.shape[:-2], idle, 2)
    return torch.cat([found, still], dim=-2)


def rotate(
    x: Float[Tensor, "b h l e"], table: Float[Tensor, "*b l p 2"], pairs: RotaryPairing
) -> Float[Tensor, "b h l e"]:
    """Every pair of channels turned by the angle whose cosine and sine stand in `table`.

    Nothing of `x` is kept for the gradient, which is the same turn backwards. Channels beyond those in the table stay.
    """
    wide = x.to(table.dtype)
    if pairs == "halves":
        return _halves(wide, table).to(x.dtype)
    # compilers fuse the sums but cannot generate code for complex numbers; without one, those are a single pass
    turned = _interleaved(wide, table) if torch.compiler.is_compiling() else _as_complex(wide, table)
    return turned.to(x.dtype)


def _as_complex(x: Tensor, table: Tensor) -> Tensor:
    if any(step % 2 for step in (*x.stride()[:-1], x.storage_offset())) or x.stride(-1) != 1:
        x = x.clone(memory_format=torch.contiguous_format)
    product = torch.view_as_complex(x.view(*x.shape[:-1], -1, 2)) * torch.view_as_complex(table)
    return torch.view_as_real(product).flatten(-2)


def _interleaved(x: Tensor, table: Tensor) -> Tensor:
    (a, b), (cos, sin) = x.view(*x.shape[:-1], -1, 2).unbind(-1), table.unbind(-1)
    return torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)


def _halves(x: Tensor, table: Tensor) -> Tensor:
    cos, sin = table.unbind(-1)
    half = cos.shape[-1]
    a, b, rest = torch.split(x, [half, half, x.shape[-1] - 2 * half], dim=-1)
    return torch.cat([torch.addcmul(a * cos, b, sin, value=-1), torch.addcmul(b * cos, a, sin), rest], dim=-1)


def convert_pairs(
    rows: Float[Tensor, "he ..."], heads: int, *, to: RotaryPairing, rotated: int | None = None
) -> Float[Tensor, "he ..."]:
    """The output rows of a projection to queries or keys (weight or bias), reordered for the other convention of pairs.

    A model of `RotaryPosition(pairs="halves")` with rows converted to "halves" computes what the model of interleaved
    pairs with the rows as they were does, and the other way round. Raises ValueError where the rows are no whole heads.
    """
    if rows.shape[0] % heads:
        raise ValueError(f"{rows.shape[0]} rows are not {heads} heads of equal width")
    width = rows.shape[0] // heads
    rotated = width if rotated is None else rotated
    check_widths(width, rotated, to)
    split, rest = torch.split(rows.view(heads, width, *rows.shape[1:]), [rotated, width - rotated], dim=1)
    # interleaved is a table of pairs x 2 read row by row, halves the same table read column by column
    shape = (rotated // 2, 2) if to == "halves" else (2, rotated // 2)
    turned = split.reshape(heads, *shape, *rows.shape[1:]).transpose(1, 2).flatten(1, 2)
    return torch.cat([turned, rest], dim=1).flatten(0, 1)
