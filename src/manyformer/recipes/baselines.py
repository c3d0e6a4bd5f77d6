"""Language models like GPT-2 and encoders like BERT, of which most recipes vary one part."""

from collections.abc import Callable
from functools import partial
from typing import Annotated, Literal

from torch import nn

from manyformer.attention import Attention
from manyformer.core import Layer
from manyformer.feedforward import FeedForward
from manyformer.kernels import Kernel
from manyformer.mixers.global_summaries import SummaryPrefixedLayer, SummaryTokens
from manyformer.models import ClassHead, LanguageModel, MaskedLM, TokenEmbedding
from manyformer.models.contrastive_loss import PartContrastiveLoss
from manyformer.position import LearnedPosition, Position, SinusoidalPosition
from manyformer.recipes.stacks import LayerMaker, LayerMakers, NormMaker, NormOrder, ResidualStreams, init_std, stack

AddedPosition = Annotated[
    Literal["sinusoid", "learned"], "positions added to embeddings: sinusoids, or learned vectors up to max_length"
]
"""Positions that are added to token embeddings."""


def sinusoidal_embedding(vocab: int, dim: int, *, dropout: float) -> TokenEmbedding:
    """A token embedding with sinusoidal positions, which allow any length."""
    return TokenEmbedding(vocab, dim, position=SinusoidalPosition(dim), scale=dim**0.5, dropout=dropout)


def learned_embedding(vocab: int, dim: int, max_length: int, *, dropout: float) -> TokenEmbedding:
    """A token embedding with learned positions for up to `max_length` tokens."""
    std = init_std(dim)
    return TokenEmbedding(vocab, dim, position=LearnedPosition(dim, max_length, std=std), std=std, dropout=dropout)


def embedding_with(position: AddedPosition, vocab: int, dim: int, max_length: int, *, dropout: float) -> TokenEmbedding:
    """A token embedding with positions of either kind."""
    if position == "sinusoid":
        return sinusoidal_embedding(vocab, dim, dropout=dropout)
    return learned_embedding(vocab, dim, max_length, dropout=dropout)


def gelu_layers(dim: int, ff_dim: int | None, make_attention: Callable[[int], Layer]) -> LayerMaker:
    """Layers with attention from `make_attention`, given the layer's number from 0, and a GELU feed-forward layer."""
    return lambda number: {"attention": make_attention(number), "ff": FeedForward(dim, ff_dim, activation=nn.GELU())}


def attention_layers(
    dim: int, heads: int, ff_dim: int | None, make_kernel: Callable[[int], Kernel], *, position: Position | None = None
) -> LayerMaker:
    """Layers with kernels from `make_kernel`, given the layer's number from 0, and one `position` for all."""
    return gelu_layers(dim, ff_dim, lambda number: Attention(dim, heads, make_kernel(number), position=position))


def language_model(
    embed: TokenEmbedding,
    depth: int,
    layer: LayerMakers,
    *,
    dropout: float,
    norm_order: NormOrder = "pre",
    streams: ResidualStreams = "plain",
) -> LanguageModel:
    """GPT-2 with this embedding, tied to the output, and these layers."""
    vocab, dim = embed.token.weight.shape
    norm = partial(nn.LayerNorm, dim)
    body = stack(depth, layer, order=norm_order, norm=norm, dropout=dropout, streams=streams, std=init_std(dim))
    return LanguageModel(embed, body, ClassHead(dim, vocab, tied=embed.token))


def masked_lm(
    embed: TokenEmbedding,
    depth: int,
    layer: LayerMakers,
    *,
    dropout: float,
    norm_order: NormOrder = "pre",
    norm: NormMaker | None = None,
    streams: ResidualStreams = "plain",
    summaries: SummaryTokens | None = None,
    contrast: PartContrastiveLoss | None = None,
) -> MaskedLM:
    """An encoder with BERT's head: a dense layer, GELU, a norm, and a projection with a bias, tied to the embedding.

    `summaries` are prefixed to each text in all layers."""
    vocab, dim = embed.token.weight.shape
    norm = partial(nn.LayerNorm, dim) if norm is None else norm
    body: Layer = stack(depth, layer, order=norm_order, norm=norm, dropout=dropout, streams=streams, std=init_std(dim))
    if summaries is not None:
        body = SummaryPrefixedLayer(body, dim, summaries)
    transform = nn.Sequential(nn.Linear(dim, dim), nn.GELU(), norm())
    return MaskedLM(
        embed, body, ClassHead(dim, vocab, tied=embed.token, transform=transform, bias=True), contrast=contrast
    )
