"""What recipes of masked diffusion share: the encoder that predicts hidden tokens, and their keywords."""

from functools import partial
from typing import Annotated, NamedTuple

from annotated_types import Ge
from torch import nn

from manyformer.models import ClassHead, TokenEmbedding
from manyformer.nn.attention.attention import Attention
from manyformer.nn.core import Layer
from manyformer.nn.feed_forward.feedforward import FeedForward
from manyformer.nn.masks import Mask
from manyformer.nn.positions import RotaryPosition
from manyformer.nn.softmax.softmax_kernel import SoftmaxKernel
from manyformer.recipes.parts.baselines import LayerMaker, NormMaker, check_heads, init_std, stack

MaskToken = Annotated[int, Ge(0), "id of the token that stands for a hidden one; the tokenizer decides it in a run"]


class EncoderParts(NamedTuple):
    """The embedding, the body and the head of an encoder."""

    embed: TokenEmbedding
    body: Layer
    head: ClassHead


def diffusion_encoder(
    vocab: int, dim: int, depth: int, layer: LayerMaker, norm: NormMaker, dropout: float
) -> EncoderParts:
    """Pre-norm layers of an encoder between an embedding and an output matrix of its own."""
    std = init_std(dim)
    embed = TokenEmbedding(vocab, dim, std=std, dropout=dropout)
    body = stack(depth, layer, order="pre", norm=norm, dropout=dropout, std=std)
    return EncoderParts(embed, body, ClassHead(dim, vocab))


def gelu_encoder(
    vocab: int, dim: int, depth: int, heads: int, ff_dim: int | None, dropout: float, mask: Mask | None = None
) -> EncoderParts:
    """The encoder of MDLM's released code: rotary positions, GELU, norms and attention without biases."""
    check_heads(dim, heads)
    rotary = RotaryPosition(dim // heads, pairs="halves")

    def layer(number: int) -> dict[str, Layer]:
        attention = Attention(dim, heads, SoftmaxKernel(mask), position=rotary, bias=False)
        return {"attention": attention, "ff": FeedForward(dim, ff_dim, activation=nn.GELU("tanh"))}

    return diffusion_encoder(vocab, dim, depth, layer, partial(nn.LayerNorm, dim, bias=False), dropout)
