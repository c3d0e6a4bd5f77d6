"""Products of queries and keys along a band of diagonals, computed as a few dense blocks.

A band holds, for each query, one number for each of `width` distances. Queries are split into blocks; a block has a
window of keys, and its part of the band is a strided view of that (queries, window) rectangle, so no index is formed.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

BLOCK = 64
"""Queries per block of a diagonal band."""


class DiagonalBand(NamedTuple):
    """Query i has the `width` keys from i + first_offset on, of which only those from 0 to `num_keys` - 1 exist."""

    first_offset: int
    width: int
    num_queries: int
    num_keys: int

    @property
    def num_blocks(self) -> int:
        """Number of query blocks."""
        return -(-self.num_queries // BLOCK)

    @property
    def window_size(self) -> int:
        """Number of keys in the window of a block."""
        return BLOCK + self.width - 1

    def valid_keys(self, device: torch.device) -> Bool[Tensor, "l w"]:
        """Boolean mask of the band's pairs whose key exists."""
        key = self.key_index(device)
        return (key >= 0) & (key < self.num_keys)

    def key_index(self, device: torch.device) -> Int[Tensor, "l w"]:
        """The index of the key of each pair in the band, whether it exists or not."""
        query, distance = (torch.arange(count, device=device) for count in (self.num_queries, self.width))
        return query[:, None] + distance + self.first_offset


def band_products(
    x: Float[Tensor, "b h l e"], y: Float[Tensor, "b h s e"], band: DiagonalBand
) -> Float[Tensor, "b h l w"]:
    """The products x_i y_j of all pairs in the band; 0 for keys that do not exist."""
    pairs = split_into_blocks(x, band) @ gather_windows(y, band).mT
    return _diagonal_view(pairs, band).flatten(2, 3)[:, :, : band.num_queries]


def band_weighted_sum(
    weights: Float[Tensor, "b h l w"], y: Float[Tensor, "b h s f"], band: DiagonalBand
) -> Float[Tensor, "b h l f"]:
    """For each query the weighted sum of its keys' y."""
    return (_scatter_to_blocks(weights, band) @ gather_windows(y, band)).flatten(2, 3)[:, :, : band.num_queries]


def band_weighted_sum_transposed(
    weights: Float[Tensor, "b h l w"], x: Float[Tensor, "b h l f"], band: DiagonalBand
) -> Float[Tensor, "b h s f"]:
    """For each key the weighted sum of its queries' x."""
    products = _scatter_to_blocks(weights, band).mT @ split_into_blocks(x, band)
    # windows of neighboring blocks overlap: pieces of a block's length are added to the rows of keys that they belong
    # to
    num_pieces = -(-band.window_size // BLOCK)
    rows = products.new_zeros(*products.shape[:2], band.num_blocks + num_pieces - 1, BLOCK, products.shape[-1])
    for piece in range(num_pieces):
        piece_products = products[:, :, :, piece * BLOCK : (piece + 1) * BLOCK]
        rows[:, :, piece : piece + band.num_blocks, : piece_products.shape[3]] += piece_products
    # row 0 is key `first_offset`
    padded = rows.flatten(2, 3)
    # negative padding drops rows of keys that do not exist
    left = band.first_offset
    right = band.num_keys - band.first_offset - padded.shape[2]
    return F.pad(padded, (0, 0, left, right))


def split_into_blocks(x: Float[Tensor, "b h l e"], band: DiagonalBand) -> Float[Tensor, "b h n c e"]:
    """Split queries into blocks, the last one padded with zeros."""
    padded = F.pad(x, (0, 0, 0, band.num_blocks * BLOCK - band.num_queries))
    return padded.view(*x.shape[:2], band.num_blocks, BLOCK, x.shape[-1])


def gather_windows(y: Float[Tensor, "b h s f"], band: DiagonalBand) -> Float[Tensor, "b h n window f"]:
    """The keys in the window of each block, zeros where there are none."""
    length = band.num_blocks * BLOCK + band.width - 1
    # negative padding drops keys outside all windows
    padded = F.pad(y, (0, 0, -band.first_offset, band.first_offset + length - band.num_keys))
    return padded.unfold(2, band.window_size, BLOCK).mT.contiguous()


def _diagonal_view(pairs: Float[Tensor, "b h n c s"], band: DiagonalBand) -> Float[Tensor, "b h n c w"]:
    """The band as a view of the rectangles, shifted by one column to the right per row."""
    pairs = pairs.contiguous()
    # the band of query i begins i columns further to the right in its rectangle
    strides = (*pairs.stride()[:3], pairs.shape[4] + 1, 1)
    return pairs.as_strided((*pairs.shape[:4], band.width), strides)


def _scatter_to_blocks(weights: Float[Tensor, "b h l w"], band: DiagonalBand) -> Float[Tensor, "b h n c s"]:
    """Rectangles that hold the band, with zeros outside it."""
    rows = split_into_blocks(weights, band)
    pairs = weights.new_zeros(*rows.shape[:4], band.window_size)
    _diagonal_view(pairs, band).copy_(rows)
    return pairs
