"""The Image Transformer with a source: images of a class, and large images from small ones."""

from functools import partial
from typing import Annotated, TypedDict, Unpack

from torch import nn

from manyformer.attention import Attention
from manyformer.core import Chain, Layer
from manyformer.errors import UserError
from manyformer.feedforward import FeedForward
from manyformer.kernels import SoftmaxKernel
from manyformer.mixers.neighbour_attention import SourceVector
from manyformer.models import EncoderDecoder, TokenEmbedding
from manyformer.models.embedding import FixedLengthSource
from manyformer.recipes.image_transformer import (
    PAPER,
    TINY,
    GeneratedBlockHeight,
    GeneratedBlockWidth,
    LogisticMixtureCount,
    MemoryHeight,
    MemoryWidth,
    level_embedding,
    level_output,
    pixels_around,
)
from manyformer.recipes.keywords import Default, ImageChannels, ImageHeight, ImageWidth, PositiveSize
from manyformer.recipes.registry import recipe
from manyformer.recipes.stacks import NormOrder, stack
from manyformer.sources import CrossAttentionSource
from manyformer.tasks.sourced_images import IMAGES_OF_CLASSES, SUPER_RESOLUTION

TINY_BLOCKS = {**TINY, "block_height": 2, "block_width": 4, "memory_height": 3, "memory_width": 2}


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
    "Image Transformer of classes",
    paper=PAPER,
    summary="An image of a given class is generated block by block; the vector of the class is added to every input.",
    task=IMAGES_OF_CLASSES,
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

    source = FixedLengthSource(
        level_embedding(vocab, dim, small, (1, small[1]), dropout), small[0] * small[1] * channels
    )
    norm = partial(nn.LayerNorm, dim)
    encoder = stack(encoder_depth, encoder_layer, order=options["norm_order"], norm=norm, dropout=dropout)
    decoder = _decoder(shape, dim, depth, heads, options, has_cross_attention=True)
    embed = _embedding(vocab, dim, shape, options)
    head = level_output(vocab, dim, options["logistic_mixtures"])
    return EncoderDecoder(source, encoder, embed, decoder, head)


def _embedding(vocab: int, dim: int, shape: tuple[int, int, int], options: DecoderOptions) -> TokenEmbedding:
    return level_embedding(vocab, dim, shape, (options["block_height"], options["block_width"]), options["dropout"])


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
        cross = {"cross": Attention(dim, heads, SoftmaxKernel(), source=CrossAttentionSource())}
        return {
            "attention": Attention(dim, heads, SoftmaxKernel(mask)),
            **(cross if has_cross_attention else {}),
            "ff": FeedForward(dim, options["ff_dim"]),
        }

    norm = partial(nn.LayerNorm, dim)
    return stack(depth, layer, order=options["norm_order"], norm=norm, dropout=options["dropout"])
