"""The Image Transformer: images are written value by value, and each value sees a neighbourhood of pixels."""

import math
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor, nn

from manyformer.attention import Attention
from manyformer.core import Layer
from manyformer.errors import UserError
from manyformer.feedforward import FeedForward
from manyformer.kernels import SoftmaxKernel
from manyformer.masks import Causal, Local2D, LocalBlocks
from manyformer.models import ClassHead, LanguageModel, LogisticMixture, OutputHead, TokenEmbedding
from manyformer.pixel_order import pixel_order
from manyformer.position import ConcatenatedGridPosition, SinusoidalPosition
from manyformer.recipes.registry import recipe
from manyformer.recipes.stacks import NormOrder, stack

PAPER = "Parmar et al. 2018, Image Transformer, arXiv:1802.05751"

SPECIALS = 5
"""The first tokens of every vocabulary are special; those from here on are levels of brightness."""

ImageSize = tuple[int, int, int]


@recipe(
    "Image Transformer",
    paper=PAPER,
    summary="An image is written value by value; each sees its block of the sequence and what stands right before it.",
    task="language-model",
    causal=True,
    incremental_decoding=True,
    cost="O(l (block + before) d + l d^2) per layer, for l = height width channels",
    reasons={"cross_attention": "it writes images from nothing, and reads no other sequence"},
    tiny_keywords={"height": 8, "width": 16, "channels": 1, "block": 4, "memory_block": 5},
)
def image_transformer(
    vocab: int = 261,
    height: int = 32,
    width: int = 32,
    channels: int = 3,
    dim: int = 512,
    depth: int = 12,
    heads: int = 4,
    ff_dim: int | None = None,
    block: int = 256,
    memory_block: int | None = 256,
    logistic_mixtures: int | None = None,
    dropout: float = 0.1,
    norm_order: NormOrder = "post",
) -> LanguageModel:
    """Local attention in one dimension: the own block up to the own value, and `lookback` values before the block.

    Sections 3 to 3.3; defaults are the best model for CIFAR-10 as released, `ff_dim` being 4 dim unless given. Values
    come row by row, the channels of a pixel together, after a start token. They are one of 256 classes, or with
    `logistic_mixtures` cut from as many logistic distributions, in which neighbouring levels are alike (section 3,
    "discretized mixture of logistics"); those have a position a value here, the paper's a position a pixel."""
    mask = Causal() & LocalBlocks(block, lookback=memory_block or 0)

    def layer() -> dict[str, Layer]:
        return {"attention": Attention(dim, heads, SoftmaxKernel(mask)), "ff": FeedForward(dim, ff_dim)}

    embed = _embedding(vocab, dim, (height, width, channels), (1, width), dropout)
    body = stack(depth, layer, order=norm_order, norm=partial(nn.LayerNorm, dim), dropout=dropout)
    return LanguageModel(embed, body, _output(vocab, dim, logistic_mixtures))


@recipe(
    "Image Transformer in two dimensions",
    paper=PAPER,
    summary="An image is written block by block; each value sees its block, and pixels around it above and on the left.",
    task="language-model",
    causal=True,
    incremental_decoding=True,
    cost="O(l (rows + above) (columns + 2 beside) d + l d^2) per layer, for l = height width channels",
    reasons={"cross_attention": "it writes images from nothing, and reads no other sequence"},
    tiny_keywords={
        "height": 8,
        "width": 16,
        "channels": 1,
        "block_height": 2,
        "block_width": 4,
        "memory_height": 3,
        "memory_width": 2,
    },
)
def image_transformer_2d(
    vocab: int = 261,
    height: int = 32,
    width: int = 32,
    channels: int = 3,
    dim: int = 512,
    depth: int = 12,
    heads: int = 4,
    ff_dim: int | None = None,
    block_height: int = 8,
    block_width: int = 16,
    memory_height: int | None = 8,
    memory_width: int | None = 16,
    logistic_mixtures: int | None = None,
    dropout: float = 0.1,
    norm_order: NormOrder = "post",
) -> LanguageModel:
    """Local attention in two dimensions: the own block up to the own value, and pixels around the block.

    Section 3.3. These are `memory_height` rows over it with `memory_width` columns on either side, and `memory_width`
    columns on its left, all of them written earlier, because blocks are written row by row and so are the pixels within
    each: the data must come in that order (`data.block`), and in a run it decides `block_height` and `block_width`.
    Everything else is as in `image-transformer`. A value enters at the place of the next one in this order, the last of
    a block thus at the first place of the next block; the released code leaves it out there. Blocks must divide the
    image."""
    # first, because it refuses blocks that do not divide the image
    embed = _embedding(vocab, dim, (height, width, channels), (block_height, block_width), dropout)
    mask = Local2D(
        width * channels, block_height, block_width * channels, memory_height or 0, (memory_width or 0) * channels
    )

    def layer() -> dict[str, Layer]:
        return {"attention": Attention(dim, heads, SoftmaxKernel(mask)), "ff": FeedForward(dim, ff_dim)}

    body = stack(depth, layer, order=norm_order, norm=partial(nn.LayerNorm, dim), dropout=dropout)
    return LanguageModel(embed, body, _output(vocab, dim, logistic_mixtures))


def _embedding(vocab: int, dim: int, shape: ImageSize, block: tuple[int, int], dropout: float) -> TokenEmbedding:
    """Values, a table for each channel, and where the value is that each of them is to predict (section 3.1).

    Half of the width tells the row of that value, half its column and channel, in sines and cosines whose waves are at
    most about twice as long as the image; most of the paper's, of up to 60,000 pixels, would be the same everywhere.
    """
    height, width, channels = shape
    if dim % 4:
        raise UserError(f"dim ({dim}) must be a multiple of 4: half of it is sines and cosines of the row")
    sides = (height, width * channels)
    axes = [SinusoidalPosition(dim // 2, base=max(side / math.pi, 2.0)) for side in sides]
    places = ConcatenatedGridPosition(sides, axes, order=pixel_order(shape, block).tolist())
    embed = TokenEmbedding(vocab, dim, position=places, tables=channels, scale=dim**0.5, dropout=dropout)
    if vocab > SPECIALS:
        embed.token.weight.data.view(channels, vocab, dim)[:, SPECIALS:] = _alike(vocab - SPECIALS, dim)
    return embed


def _alike(levels: int, dim: int) -> Float[Tensor, "levels d"]:
    """Vectors of norm 1 for levels, of which neighbours are alike: half a wave over all levels, up to sixteen.

    The paper's start at random, so that each of 256 shades must be learned by itself.
    """
    waves = math.pi / levels * torch.logspace(0, 5, dim // 2, base=2)
    angle = torch.arange(levels)[:, None] * waves
    return torch.cat([angle.sin(), angle.cos()], dim=1) * math.sqrt(2 / dim)


def _output(vocab: int, dim: int, mixtures: int | None) -> OutputHead:
    return ClassHead(dim, vocab) if mixtures is None else LogisticMixture(dim, vocab, mixtures, first=SPECIALS)
