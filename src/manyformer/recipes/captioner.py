"""Images to text: the encoder of a Vision Transformer and a causal decoder that attends to its patches."""

from functools import partial

from torch import nn

from manyformer.models import ClassHead, EncoderDecoder, PatchEmbedding
from manyformer.models.tasks.captioning import CAPTIONING
from manyformer.nn.softmax.softmax_kernel import SoftmaxKernel
from manyformer.recipes.parts.baselines import attention_layers, decoder_layers, init_std, sinusoidal_embedding, stack
from manyformer.recipes.parts.keywords import ImageChannels, ImageHeight, ImageWidth, PatchSide
from manyformer.recipes.parts.registry import recipe
from manyformer.recipes.vit import TINY_IMAGES, PatchPositionKind, patch_positions


@recipe(
    "Captioner",
    paper="Dosovitskiy et al. 2021, arXiv:2010.11929, with the decoder of Vaswani et al. 2017, arXiv:1706.03762",
    summary="An image is a source of patches, to which each token of its description attends.",
    task=CAPTIONING,
    family="softmax",
    cost="O((p + l)^2 d + (p + l) d^2) per layer, for p patches",
    tiny_keywords=TINY_IMAGES,
)
def captioner(
    vocab: int = 10000,
    height: ImageHeight = 224,
    width: ImageWidth = 224,
    channels: ImageChannels = 3,
    patch: PatchSide = 16,
    dim: int = 384,
    depth: int = 6,
    heads: int = 6,
    ff_dim: int | None = None,
    positions: PatchPositionKind = "learned",
    dropout: float = 0.1,
) -> EncoderDecoder:
    """The Vision Transformer's encoder without a class token (section 3.1), and a decoder with cross-attention.

    Both sides are pre-norm with GELU; the decoder has sinusoidal positions, so captions have any length, and its
    embedding is also the output matrix. Different from captioners of large data, nothing is trained beforehand."""
    shape = (height, width, channels)
    norm = partial(nn.LayerNorm, dim, eps=1e-6)
    std = init_std(dim)

    # no token stands before the patches: captions attend to all of them, and nothing is pooled
    position = patch_positions(positions, shape, patch, dim, 0)
    embed_source = PatchEmbedding(shape, patch, dim, position=position, dropout=dropout)
    embed_target = sinusoidal_embedding(vocab, dim, dropout=dropout)
    encoder_layer = attention_layers(dim, heads, ff_dim, lambda number: SoftmaxKernel())
    encoder = stack(depth, encoder_layer, order="pre", norm=norm, dropout=dropout, std=std)
    decoder = stack(depth, decoder_layers(dim, heads, ff_dim), order="pre", norm=norm, dropout=dropout, std=std)
    return EncoderDecoder(embed_source, encoder, embed_target, decoder, ClassHead(dim, vocab, tied=embed_target.token))
