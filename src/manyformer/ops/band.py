"""The pairs of a query and a key that are near each other: products along a band of diagonals, as a few dense blocks.

A band holds, for each query, one number for each of `width` distances. Queries are taken in blocks; a block sees a
window of keys, and its part of the band is a slanted view of that (queries, window) rectangle, so no index is formed.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

BLOCK = 64


class DiagonalBand(NamedTuple):
    """Query i has the keys i + first, ..., i + first + width - 1, of which only those from 0 to `keys` - 1 exist."""

    first: int
    width: int
    queries: int
    keys: int

    @property
    def blocks(self) -> int:
        """How many blocks the queries make."""
        return -(-self.queries // BLOCK)

    @property
    def window(self) -> int:
        """How many keys a block sees."""
        return BLOCK + self.width - 1

    def exists(self, device: torch.device) -> Bool[Tensor, "l w"]:
        """Which of the keys there are."""
        key = torch.arange(self.queries, device=device)[:, None] + torch.arange(self.width, device=device) + self.first
        return (key >= 0) & (key < self.keys)


def band_products(
    x: Float[Tensor, "b h l e"], y: Float[Tensor, "b h s e"], band: DiagonalBand
) -> Float[Tensor, "b h l w"]:
    """The products x_i y_j of all pairs in the band; keys that do not exist count as zeros."""
    pairs = blocks_of(x, band) @ windows_of(y, band).mT
    return _slanted(pairs, band).flatten(2, 3)[:, :, : band.queries]


def band_weighted_sum(
    weights: Float[Tensor, "b h l w"], y: Float[Tensor, "b h s f"], band: DiagonalBand
) -> Float[Tensor, "b h l f"]:
    """For each query the sum of the keys' y, weighted."""
    return (_spread(weights, band) @ windows_of(y, band)).flatten(2, 3)[:, :, : band.queries]


def band_weighted_sum_transposed(
    weights: Float[Tensor, "b h l w"], x: Float[Tensor, "b h l f"], band: DiagonalBand
) -> Float[Tensor, "b h s f"]:
    """For each key the sum of the queries' x, weighted."""
    parts = _spread(weights, band).mT @ blocks_of(x, band)
    pieces = -(-band.window // BLOCK)
    rows = parts.new_zeros(*parts.shape[:2], band.blocks + pieces - 1, BLOCK, parts.shape[-1])
    for piece in range(pieces):
        part = parts[:, :, :, piece * BLOCK : (piece + 1) * BLOCK]
        rows[:, :, piece : piece + band.blocks, : part.shape[3]] += part
    # row 0 is key `first`
    padded = rows.flatten(2, 3)
    left, right = band.first, band.keys - band.first - padded.shape[2]
    return F.pad(padded, (0, 0, left, right))


def blocks_of(x: Float[Tensor, "b h l e"], band: DiagonalBand) -> Float[Tensor, "b h n c e"]:
    """Queries in blocks, the last one filled up with zeros."""
    padded = F.pad(x, (0, 0, 0, band.blocks * BLOCK - band.queries))
    return padded.view(*x.shape[:2], band.blocks, BLOCK, x.shape[-1])


def windows_of(y: Float[Tensor, "b h s f"], band: DiagonalBand) -> Float[Tensor, "b h n window f"]:
    """The keys that each block sees, zeros where there are none."""
    length = band.blocks * BLOCK + band.width - 1
    # negative padding cuts off what no block sees
    padded = F.pad(y, (0, 0, -band.first, band.first + length - band.keys))
    return padded.unfold(2, band.window, BLOCK).mT.contiguous()


def _slanted(pairs: Float[Tensor, "b h n c s"], band: DiagonalBand) -> Float[Tensor, "b h n c w"]:
    """The band as a view of the rectangles: one column to the right in each next row."""
    pairs = pairs.contiguous()
    strides = (*pairs.stride()[:3], pairs.shape[4] + 1, 1)
    return pairs.as_strided((*pairs.shape[:4], band.width), strides)


def _spread(weights: Float[Tensor, "b h l w"], band: DiagonalBand) -> Float[Tensor, "b h n c s"]:
    """Rectangles with the band in its place and zeros around it."""
    rows = blocks_of(weights, band)
    pairs = weights.new_zeros(*rows.shape[:4], band.window)
    _slanted(pairs, band).copy_(rows)
    return pairs
