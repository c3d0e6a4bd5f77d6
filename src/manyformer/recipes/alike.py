"""Models that differ in the kernel of their attention alone, so that recipes of kernels compare."""

from collections.abc import Callable
from functools import partial
from typing import Literal

from torch import nn

from manyformer.attention import Attention
from manyformer.core import Chain, Layer
from manyformer.feedforward import FeedForward
from manyformer.kernels import Kernel
from manyformer.models import Embedding, Head, LanguageModel, MaskedLM
from manyformer.position import Learned, Sinusoid
from manyformer.recipes.stacks import NormOrder, shrink_outputs, small_std, stack

Make = Callable[[], Kernel]
"""Makes the kernel of one layer after the other."""

Added = Literal["sinusoid", "learned"]
"""Positions that are added to tokens."""


def sinusoids(vocab: int, dim: int, *, dropout: float) -> Embedding:
    """Tokens with sinusoids, which allow any length."""
    return Embedding(vocab, dim, position=Sinusoid(dim), scale=dim**0.5, dropout=dropout)


def learned(vocab: int, dim: int, longest: int, *, dropout: float) -> Embedding:
    """Tokens with learned positions, for up to `longest` tokens."""
    std = small_std(dim)
    return Embedding(vocab, dim, position=Learned(dim, longest, std=std), std=std, dropout=dropout)


def added(position: Added, vocab: int, dim: int, longest: int, *, dropout: float) -> Embedding:
    """Tokens with positions of either kind."""
    if position == "sinusoid":
        return sinusoids(vocab, dim, dropout=dropout)
    return learned(vocab, dim, longest, dropout=dropout)


def language_model(
    embed: Embedding, depth: int, heads: int, hidden: int | None, kernel: Make, *, dropout: float, norm: NormOrder
) -> LanguageModel:
    """`transformer-lm` with another kernel."""
    body = _body(embed, depth, heads, hidden, kernel, dropout, norm)
    return LanguageModel(embed, body, Head(*embed.token.weight.shape[::-1], tied=embed.token))


def masked_lm(
    embed: Embedding, depth: int, heads: int, hidden: int | None, kernel: Make, *, dropout: float, norm: NormOrder
) -> MaskedLM:
    """The same as an encoder, with the head of BERT: a layer of its own, and a bias."""
    vocab, dim = embed.token.weight.shape
    body = _body(embed, depth, heads, hidden, kernel, dropout, norm)
    transform = nn.Sequential(nn.Linear(dim, dim), nn.GELU(), nn.LayerNorm(dim))
    return MaskedLM(embed, body, Head(dim, vocab, tied=embed.token, transform=transform, bias=True))


def _body(
    embed: Embedding, depth: int, heads: int, hidden: int | None, kernel: Make, dropout: float, norm: NormOrder
) -> Chain:
    dim = embed.token.weight.shape[1]

    def layer() -> dict[str, Layer]:
        return {
            "attention": Attention(dim, heads, kernel()),
            "ff": FeedForward(dim, hidden, activation=nn.GELU()),
        }

    body = stack(depth, layer, order=norm, norm=partial(nn.LayerNorm, dim), dropout=dropout)
    shrink_outputs(body, depth, std=small_std(dim))
    return body
