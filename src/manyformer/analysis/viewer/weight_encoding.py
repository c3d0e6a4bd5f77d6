"""Attention weights as few bytes: levels relative to the largest weight of a row, compressed, and pooled if large."""

import base64
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int8
from torch import Tensor

from manyformer.analysis.figures.attention_maps import row_shares

LEVELS = 126.5
"""The levels of one sign: 127 of equal width, and the largest weight is the middle of the last one."""

MAX_ENCODED_CHARACTERS = 4 * 2**20
"""The most base64 characters of all weights of one model."""


MAX_WEIGHTS = 16 * 2**20
"""The most weights of one model that a browser unpacks."""


class WeightLevels(NamedTuple):
    """Weights as integers from -127 to 127, and the scale of each row.

    A weight other than 0 has the magnitude of its level less 0.5, over 126.5, times the scale of its row.
    """

    scales: Float[Tensor, "h l"]
    levels: Int8[Tensor, "h l s"]


class EncodedWeights(NamedTuple):
    """All scales as float32, then all levels as bytes, both in the order of the maps: deflated, in base64.

    Each level stands for `pooling` x `pooling` weights.
    """

    text: str
    levels: list[WeightLevels]
    pooling: int


def encode_weights(
    maps: Sequence[Float[Tensor, "_ _ _"]], max_characters: int = MAX_ENCODED_CHARACTERS
) -> EncodedWeights:
    """Encode maps of weights (h, l, s); if they take more than `max_characters`, they are pooled until they do not.

    Pooling takes the largest weight, because a mean would hide heads that attend to single tokens.
    """
    pooling = 1
    while True:
        # before encoding: weights that a browser cannot unpack need not be compressed
        if sum(weights.numel() for weights in maps) > MAX_WEIGHTS * pooling**2:
            pooling *= 2
            continue
        levels = [quantize_weights(pool_largest(weights, pooling)) for weights in maps]
        # scales before levels, because floats must begin at a multiple of four bytes
        scales = b"".join(map_levels.scales.numpy().astype("<f4").tobytes() for map_levels in levels)
        cells = b"".join(map_levels.levels.numpy().tobytes() for map_levels in levels)
        text = deflate(scales + cells)
        if len(text) <= max_characters:
            return EncodedWeights(text, levels, pooling)
        pooling *= 2


def deflate(content: bytes) -> str:
    """Compressed bytes in base64, which the page unpacks."""
    return base64.b64encode(zlib.compress(content, 9)).decode("ascii")


def quantize_weights(weights: Float[Tensor, "h l s"]) -> WeightLevels:
    """Each row as levels of its largest absolute weight; a weight that is not 0 has no level 0."""
    shares = row_shares(weights)
    # the sign of 0 is 0, so that only weights of exactly 0 have level 0
    levels = (shares.abs() * LEVELS).ceil().clamp(min=1) * shares.sign()
    return WeightLevels(weights.abs().amax(-1), levels.to(torch.int8))


def pool_largest(weights: Float[Tensor, "h l s"], size: int) -> Float[Tensor, "h m n"]:
    """The weight with the largest absolute value of each `size` x `size` square; the last squares may be smaller."""
    if size == 1:
        return weights
    highest = F.max_pool2d(weights, size, ceil_mode=True)
    lowest = -F.max_pool2d(-weights, size, ceil_mode=True)
    # some kernels have negative weights: the larger magnitude wins, with its sign
    return torch.where(highest >= -lowest, highest, lowest)
