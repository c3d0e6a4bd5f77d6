"""The encoder-decoder Transformer with relative positions in its attention instead of absolute ones."""

from functools import partial
from typing import Annotated, Literal

from torch import nn

from manyformer.attention import Attention
from manyformer.core import Layer
from manyformer.feedforward import FeedForward
from manyformer.kernels import SoftmaxKernel
from manyformer.masks import Causal
from manyformer.models import ClassHead, EncoderDecoder, TokenEmbedding
from manyformer.position import ShawPosition
from manyformer.position.distance_bias import BiasDirection
from manyformer.recipes.keywords import MaxRelativeDistance
from manyformer.recipes.registry import recipe
from manyformer.recipes.stacks import NormOrder, stack
from manyformer.sources import CrossAttentionSource
from manyformer.tasks.translation import TRANSLATION


@recipe(
    "Relative positions",
    paper="Shaw et al. 2018, Self-Attention with Relative Position Representations, arXiv:1803.02155",
    summary="Learned embeddings of relative distance are added to the keys and values of each pair of tokens.",
    task=TRANSLATION,
    cost="O(l^2 d + l d^2) per layer",
    tiny_keywords={"max_relative_distance": 3},
)
def shaw(
    vocab: int = 37000,
    source_vocab: int | None = None,
    dim: int = 512,
    depth: int = 6,
    heads: int = 8,
    ff_dim: int | None = None,
    max_relative_distance: MaxRelativeDistance = 16,
    tables: Annotated[
        Literal["head", "layer"], "relative position tables for each head, or one for all heads of a layer"
    ] = "head",
    dropout: float = 0.1,
    norm_order: NormOrder = "post",
) -> EncoderDecoder:
    """`transformer` with the positions of section 3 in the self-attention of both sides, and no sinusoids.

    Distances are clipped to `max_relative_distance`. Section 4.1: the base model has tables for each head
    (`tables="head"`) and clips at 16, the big one has tables for each layer and clips at 8. Cross-attention has no
    positions. A language model with the same positions is `compose` with `position="shaw"`."""
    layer_norm = partial(nn.LayerNorm, dim)

    def self_attention(kernel: SoftmaxKernel, sides: BiasDirection) -> Attention:
        position = ShawPosition(
            dim // heads, max_relative_distance, heads=heads if tables == "head" else None, direction=sides
        )
        return Attention(dim, heads, kernel, position=position)

    def encoder_layer(number: int) -> dict[str, Layer]:
        return {"attention": self_attention(SoftmaxKernel(), "both"), "ff": FeedForward(dim, ff_dim)}

    def decoder_layer(number: int) -> dict[str, Layer]:
        return {
            "attention": self_attention(SoftmaxKernel(Causal()), "past"),
            "cross": Attention(dim, heads, SoftmaxKernel(), source=CrossAttentionSource()),
            "ff": FeedForward(dim, ff_dim),
        }

    def embedding(size: int) -> TokenEmbedding:
        return TokenEmbedding(size, dim, scale=dim**0.5, dropout=dropout)

    embed = embedding(vocab)
    embed_source = embed if source_vocab is None else embedding(source_vocab)
    encoder = stack(depth, encoder_layer, order=norm_order, norm=layer_norm, dropout=dropout)
    decoder = stack(depth, decoder_layer, order=norm_order, norm=layer_norm, dropout=dropout)
    return EncoderDecoder(embed_source, encoder, embed, decoder, ClassHead(dim, vocab, tied=embed.token))
