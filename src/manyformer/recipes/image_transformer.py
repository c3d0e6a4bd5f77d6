"""The Image Transformer: images are generated value by value with local attention, also of a class or a small image."""

import math
from functools import partial
from typing import Annotated, TypedDict, Unpack

import torch
from jaxtyping import Float
from torch import Tensor, nn

from manyformer.base.errors import UserError
from manyformer.models import ClassHead, EncoderDecoder, LanguageModel, LogisticMixture, OutputHead, TokenEmbedding
from manyformer.models.embedding import FixedLengthSource
from manyformer.models.tasks.language_modelling import IMAGE_GENERATION
from manyformer.models.tasks.sourced_images import IMAGES_OF_CLASSES, SUPER_RESOLUTION
from manyformer.nn.attention.attention import Attention
from manyformer.nn.attention.kv_cache import CrossAttentionSource
from manyformer.nn.attention.neighbour_attention import SourceVector
from manyformer.nn.core import Chain, Layer
from manyformer.nn.feed_forward.feedforward import FeedForward
from manyformer.nn.masks import Causal, Local2D, LocalBlocks, Mask
from manyformer.nn.positions import ConcatenatedGridPosition, SinusoidalPosition
from manyformer.nn.softmax.softmax_kernel import SoftmaxKernel
from manyformer.nn.structures import pixel_order
from manyformer.recipes.parts.baselines import NormOrder, stack
from manyformer.recipes.parts.keywords import BlockLength, Default, ImageChannels, ImageHeight, ImageWidth, PositiveSize
from manyformer.recipes.parts.registry import recipe

PAPER = "Parmar et al. 2018, Image Transformer, arXiv:1802.05751"

TINY = {"height": 8, "width": 16, "channels": 1}

TINY_BLOCKS = {**TINY, "block_height": 2, "block_width": 4, "memory_height": 3, "memory_width": 2}

SPECIALS = 5
"""The number of special tokens at the start of a vocabulary; the tokens after them are levels of brightness."""

ImageSize = tuple[int, int, int]

GeneratedBlockHeight = Annotated[
    PositiveSize, "height of the blocks in which images are generated; the data decides it in a run"
]

GeneratedBlockWidth = Annotated[
    PositiveSize, "width of the blocks in which images are generated; the data decides it in a run"
]

MemoryHeight = Annotated[PositiveSize | None, "number of rows above its block that a pixel attends to; null means none"]

MemoryWidth = Annotated[
    PositiveSize | None,
    "number of columns beside its block that a pixel attends to: on both sides above it, and on the left;"
    " null means none",
]

LogisticMixtureCount = Annotated[
    PositiveSize | None, "number of logistic distributions in the output mixture; null means a class for each level"
]


class DecoderOptions(TypedDict, total=False):
    """The keywords of the decoder that both recipes share."""

    ff_dim: Annotated[int | None, Default(None)]
    block_height: Annotated[GeneratedBlockHeight, Default(8)]
    block_width: Annotated[GeneratedBlockWidth, Default(16)]
    memory_height: Annotated[MemoryHeight, Default(8)]
    memory_width: Annotated[MemoryWidth, Default(16)]
    logistic_mixtures: Annotated[LogisticMixtureCount, Default(None)]
    dropout: Annotated[float, Default(0.1)]
    norm_order: Annotated[NormOrder, Default("post")]


@recipe(
    "Image Transformer",
    paper=PAPER,
    summary="An image is generated value by value; each attends to its block of the sequence and a memory block before "
    "it.",
    task=IMAGE_GENERATION,
    family="sparse",
    constant_state=True,
    cost="O(l (block + memory_block) d + l d^2) per layer, for l = height width channels",
    tiny_keywords={**TINY, "block": 4, "memory_block": 5},
)
def image_transformer(
    vocab: int = 261,
    height: ImageHeight = 32,
    width: ImageWidth = 32,
    channels: ImageChannels = 3,
    dim: int = 512,
    depth: int = 12,
    heads: int = 4,
    ff_dim: int | None = None,
    block: BlockLength = 256,
    memory_block: Annotated[
        PositiveSize | None, "number of positions before its block that a token also attends to; null means none"
    ] = 256,
    logistic_mixtures: LogisticMixtureCount = None,
    dropout: float = 0.1,
    norm_order: NormOrder = "post",
) -> LanguageModel:
    """Local attention in one dimension: a value's block up to the value, and `memory_block` values before the block.

    Sections 3 to 3.3; defaults are the best model for CIFAR-10 as released, with `ff_dim` 4 dim unless given. Values
    come row by row, the channels of a pixel together, after a start token. They are one of 256 classes, or with
    `logistic_mixtures` follow a discretized mixture of that many logistic distributions (section 3); here there is one
    position for each value, in the paper one for each pixel."""
    # blocks do not overlap: a value's memory is the same for all of its block, and computed once for it (section 3.3)
    mask = Causal() & LocalBlocks(block, lookback=memory_block or 0)

    def layer(number: int) -> dict[str, Layer]:
        return {"attention": Attention(dim, heads, SoftmaxKernel(mask)), "ff": FeedForward(dim, ff_dim)}

    embed = level_embedding(vocab, dim, (height, width, channels), (1, width), dropout)
    body = stack(depth, layer, order=norm_order, norm=partial(nn.LayerNorm, dim), dropout=dropout)
    return LanguageModel(embed, body, level_output(vocab, dim, logistic_mixtures))


@recipe(
    "Image Transformer in two dimensions",
    paper=PAPER,
    summary="An image is generated block by block; each value attends to its block and to pixels above and left of it.",
    task=IMAGE_GENERATION,
    family="sparse",
    constant_state=True,
    cost="O(l (block_height + memory_height) (block_width + 2 memory_width) d + l d^2) per layer, for l = height width "
    "channels",
    tiny_keywords={**TINY, "block_height": 2, "block_width": 4, "memory_height": 3, "memory_width": 2},
)
def image_transformer_2d(
    vocab: int = 261,
    height: ImageHeight = 32,
    width: ImageWidth = 32,
    channels: ImageChannels = 3,
    dim: int = 512,
    depth: int = 12,
    heads: int = 4,
    ff_dim: int | None = None,
    block_height: GeneratedBlockHeight = 8,
    block_width: GeneratedBlockWidth = 16,
    memory_height: MemoryHeight = 8,
    memory_width: MemoryWidth = 16,
    logistic_mixtures: LogisticMixtureCount = None,
    dropout: float = 0.1,
    norm_order: NormOrder = "post",
) -> LanguageModel:
    """Local attention in two dimensions: a value's block up to the value, and pixels around the block.

    Section 3.3. These are `memory_height` rows above it with `memory_width` columns on each side, and `memory_width`
    columns on its left, all of them generated earlier, because blocks are generated row by row and so are the pixels
    within each: the data must have that order (`data.block`), which in a run decides `block_height` and `block_width`.
    Everything else is as in `image-transformer`. The input at each position is the previous value in this order, at the
    first position of a block the last value of the previous block, which the released code leaves out. Blocks must
    divide the image."""
    # before the mask, because it refuses blocks that do not divide the image
    embed = level_embedding(vocab, dim, (height, width, channels), (block_height, block_width), dropout)
    mask = pixels_around((height, width, channels), (block_height, block_width), memory_height, memory_width)

    def layer(number: int) -> dict[str, Layer]:
        return {"attention": Attention(dim, heads, SoftmaxKernel(mask)), "ff": FeedForward(dim, ff_dim)}

    body = stack(depth, layer, order=norm_order, norm=partial(nn.LayerNorm, dim), dropout=dropout)
    return LanguageModel(embed, body, level_output(vocab, dim, logistic_mixtures))


@recipe(
    "Image Transformer of classes",
    paper=PAPER,
    summary="An image of a given class is generated block by block; the vector of the class is added to every input.",
    task=IMAGES_OF_CLASSES,
    family="sparse",
    constant_state=True,
    cost="O(l (block_height + memory_height) (block_width + 2 memory_width) d + l d^2) per layer, for l = height width "
    "channels",
    tiny_keywords=TINY_BLOCKS,
)
def image_transformer_classes(
    vocab: int = 261,
    classes: Annotated[PositiveSize, "number of classes; the data decides it in a run"] = 10,
    height: ImageHeight = 32,
    width: ImageWidth = 32,
    channels: ImageChannels = 3,
    dim: int = 512,
    depth: int = 12,
    heads: int = 4,
    **options: Unpack[DecoderOptions],
) -> EncoderDecoder:
    """`image-transformer-2d` with a learned vector for each class, which is added to every input with its position.

    Section 5.1. With blocks of one row, the order of data without `data.block`, it is local attention in one dimension:
    the row of a value and `memory_height` rows above."""
    shape = (height, width, channels)
    decoder = _decoder(shape, dim, depth, heads, options, has_cross_attention=False)
    # the source is one token, the class, and the encoder does nothing to it
    embed_class = TokenEmbedding(classes, dim, scale=dim**0.5)
    embed = _embedding(vocab, dim, shape, options)
    head = level_output(vocab, dim, options["logistic_mixtures"])
    body = Chain(source=SourceVector(), layers=decoder)
    return EncoderDecoder(FixedLengthSource(embed_class, 1), Chain(), embed, body, head)


@recipe(
    "Image Transformer for super-resolution",
    paper=PAPER,
    summary="A small image is a source of pixels, to which each value of the large one attends as it is generated.",
    task=SUPER_RESOLUTION,
    family="sparse",
    constant_state=True,
    cost="O(l (block_height + memory_height) (block_width + 2 memory_width) d + l s d + l d^2) per layer, for l = "
    "height width channels and a source of s = l / reduction^2",
    tiny_keywords={**TINY_BLOCKS, "encoder_depth": 1},
)
def image_transformer_superresolution(
    vocab: int = 261,
    height: ImageHeight = 32,
    width: ImageWidth = 32,
    channels: ImageChannels = 3,
    reduction: Annotated[
        PositiveSize, "how many times smaller height and width of the source are; the data decides it in a run"
    ] = 4,
    dim: int = 512,
    depth: int = 12,
    heads: int = 4,
    encoder_depth: Annotated[PositiveSize, "number of layers of the encoder"] = 4,
    **options: Unpack[DecoderOptions],
) -> EncoderDecoder:
    """The encoder-decoder of sections 3.2 and 5.3: every value of the small image attends to all, as do the large ones.

    The decoder is `image-transformer-2d` with attention to the encoder in every layer; by default the paper's
    fourfold super-resolution of 8 x 8 pixels. With blocks of one row, the order of data without `data.block`, it is
    local attention in one dimension."""
    if height % reduction or width % reduction:
        raise UserError(f"reduction ({reduction}) must divide the image of {height} x {width}")
    shape = (height, width, channels)
    small = (height // reduction, width // reduction, channels)
    dropout = options["dropout"]
    ff_dim = options["ff_dim"]

    def encoder_layer(number: int) -> dict[str, Layer]:
        return {"attention": Attention(dim, heads, SoftmaxKernel()), "ff": FeedForward(dim, ff_dim)}

    # the small image has a fixed number of values, so nothing of it is padding
    source = FixedLengthSource(
        level_embedding(vocab, dim, small, (1, small[1]), dropout), small[0] * small[1] * channels
    )
    norm = partial(nn.LayerNorm, dim)
    encoder = stack(encoder_depth, encoder_layer, order=options["norm_order"], norm=norm, dropout=dropout)
    decoder = _decoder(shape, dim, depth, heads, options, has_cross_attention=True)
    embed = _embedding(vocab, dim, shape, options)
    head = level_output(vocab, dim, options["logistic_mixtures"])
    return EncoderDecoder(source, encoder, embed, decoder, head)


def _decoder(
    shape: tuple[int, int, int],
    dim: int,
    depth: int,
    heads: int,
    options: DecoderOptions,
    *,
    has_cross_attention: bool,
) -> Layer:
    """Layers with local attention, and attention to the source if there is any."""
    block = (options["block_height"], options["block_width"])
    mask = pixels_around(shape, block, options["memory_height"], options["memory_width"])

    def layer(number: int) -> dict[str, Layer]:
        # drawn for both recipes: a seed then gives the same weights to what follows
        cross = {"cross": Attention(dim, heads, SoftmaxKernel(), source=CrossAttentionSource())}
        return {
            "attention": Attention(dim, heads, SoftmaxKernel(mask)),
            **(cross if has_cross_attention else {}),
            "ff": FeedForward(dim, options["ff_dim"]),
        }

    norm = partial(nn.LayerNorm, dim)
    return stack(depth, layer, order=options["norm_order"], norm=norm, dropout=options["dropout"])


def _embedding(vocab: int, dim: int, shape: tuple[int, int, int], options: DecoderOptions) -> TokenEmbedding:
    return level_embedding(vocab, dim, shape, (options["block_height"], options["block_width"]), options["dropout"])


def level_embedding(vocab: int, dim: int, shape: ImageSize, block: tuple[int, int], dropout: float) -> TokenEmbedding:
    """An embedding with a table for each channel and the position of the value to be predicted (section 3.1).

    Half of the width encodes the row of that value, half its column and channel, in sines and cosines whose waves are
    at most about twice as long as the image; most of the paper's waves, of up to 60,000 pixels, would be nearly
    constant."""
    height, width, channels = shape
    if dim % 4:
        raise UserError(f"dim ({dim}) must be a multiple of 4: half of it is sines and cosines of the row")
    # channels are columns of their own: a row has width * channels values
    sides = (height, width * channels)
    axes = [SinusoidalPosition(dim // 2, base=max(side / math.pi, 2.0)) for side in sides]
    position = ConcatenatedGridPosition(sides, axes, order=pixel_order(shape, block).tolist())
    embed = TokenEmbedding(vocab, dim, position=position, tables=channels, scale=dim**0.5, dropout=dropout)
    # special tokens keep their random vectors: they are not levels
    if vocab > SPECIALS:
        embed.token.weight.data.view(channels, vocab, dim)[:, SPECIALS:] = _similar_level_vectors(vocab - SPECIALS, dim)
    return embed


def _similar_level_vectors(levels: int, dim: int) -> Float[Tensor, "levels d"]:
    """Initial level embeddings of norm 1, similar for close levels: sinusoids of half a wave to sixteen waves.

    The paper's embeddings are initialized at random, so that each of 256 shades must be learned separately."""
    waves = math.pi / levels * torch.logspace(0, 5, dim // 2, base=2)
    angle = torch.arange(levels)[:, None] * waves
    return torch.cat([angle.sin(), angle.cos()], dim=1) * math.sqrt(2 / dim)


def pixels_around(
    shape: ImageSize, block: tuple[int, int], memory_height: int | None, memory_width: int | None
) -> Mask:
    """Who sees whom in two dimensions: a value its block up to itself, and the pixels around the block."""
    _, width, channels = shape
    rows, columns = block
    return Local2D(width * channels, rows, columns * channels, memory_height or 0, (memory_width or 0) * channels)


def level_output(vocab: int, dim: int, mixtures: int | None) -> OutputHead:
    """The output of the levels: a class for each, or a mixture of logistic distributions."""
    if mixtures is None:
        return ClassHead(dim, vocab)
    return LogisticMixture(dim, vocab, mixtures, first=SPECIALS)
