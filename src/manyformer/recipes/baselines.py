"""Baseline models that differ only in their attention kernel, so that recipes of kernels can be compared."""

from collections.abc import Callable
from functools import partial
from typing import Annotated, Literal

from torch import nn

from manyformer.attention import Attention
from manyformer.core import Chain, Layer
from manyformer.feedforward import FeedForward
from manyformer.kernels import Kernel
from manyformer.models import ClassHead, LanguageModel, MaskedLM, TokenEmbedding
from manyformer.position import LearnedPosition, SinusoidalPosition
from manyformer.recipes.stacks import NormOrder, init_std, scale_residual_init, stack

KernelMaker = Callable[[int], Kernel]
"""Makes the kernel of the layer of a number, counted from 0."""

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


def language_model(
    embed: TokenEmbedding,
    depth: int,
    heads: int,
    ff_dim: int | None,
    kernel: KernelMaker,
    *,
    dropout: float,
    norm_order: NormOrder,
) -> LanguageModel:
    """`transformer-lm` with another attention kernel."""
    body = _body(embed, depth, heads, ff_dim, kernel, dropout, norm_order)
    return LanguageModel(embed, body, ClassHead(*embed.token.weight.shape[::-1], tied=embed.token))


def masked_lm(
    embed: TokenEmbedding,
    depth: int,
    heads: int,
    ff_dim: int | None,
    kernel: KernelMaker,
    *,
    dropout: float,
    norm_order: NormOrder,
) -> MaskedLM:
    """An encoder with the same layers and BERT's head: a dense layer, GELU, a norm, and a projection with a bias."""
    vocab, dim = embed.token.weight.shape
    body = _body(embed, depth, heads, ff_dim, kernel, dropout, norm_order)
    transform = nn.Sequential(nn.Linear(dim, dim), nn.GELU(), nn.LayerNorm(dim))
    return MaskedLM(embed, body, ClassHead(dim, vocab, tied=embed.token, transform=transform, bias=True))


def _body(
    embed: TokenEmbedding,
    depth: int,
    heads: int,
    ff_dim: int | None,
    kernel: KernelMaker,
    dropout: float,
    norm_order: NormOrder,
) -> Chain:
    dim = embed.token.weight.shape[1]

    def layer(number: int) -> dict[str, Layer]:
        return {
            "attention": Attention(dim, heads, kernel(number)),
            "ff": FeedForward(dim, ff_dim, activation=nn.GELU()),
        }

    body = stack(depth, layer, order=norm_order, norm=partial(nn.LayerNorm, dim), dropout=dropout)
    scale_residual_init(body, depth, std=init_std(dim))
    return body
