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
        self.register_buffer("table", self._rows(torch.arange(512)), persistent=False)
        self.table: Tensor

    def _rows(self, pos: Int[Tensor, "*p"]) -> Float[Tensor, "*p d"]:
        rate = torch.exp(
            torch.arange(0, self.dim, 2, device=pos.device, dtype=torch.float64) * (-math.log(10000.0) / self.dim)
        )
        angle = pos[..., None].double() * rate
        if self.layout == "halves":
            return torch.cat([angle.sin(), angle.cos()], dim=-1).float()
        return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(-2).float()

    def embed(self, x: Float[Tensor, "b l d"], place: Place) -> Float[Tensor, "b l d"]:
        if isinstance(place.layout, Plain):
            first, last = place.layout.start, place.layout.start + x.shape[1]
            if last > self.table.shape[0]:
                self.table = self._rows(torch.arange(2 * last, device=self.table.device))
            return x + self.table[first:last].to(x.dtype)
        # a position that no table row holds yet is computed, so no look at the largest one is needed
        return x + self._rows(place.pos).to(x.dtype)


@final
class Learned(Position):
    """A learned vector for each of `longest` positions (Gehring et al. 2017, section 3.1)."""

    def __init__(self, dim: int, longest: int, *, std: float = 0.02) -> None:
        super().__init__()
        if longest < 1:
            raise ValueError(f"Learned: longest ({longest}) must be at least 1 position")
        self.longest = longest
        self.weight = nn.Parameter(torch.empty(longest, dim))
        nn.init.normal_(self.weight, std=std)

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
