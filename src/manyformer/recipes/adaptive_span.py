"""Attention whose heads learn how far to look back."""

from functools import partial
from typing import Literal

from torch import nn

from manyformer.attention import Attention
from manyformer.core import Layer
from manyformer.errors import UserError
from manyformer.feedforward import FeedForward
from manyformer.kernels.spanned import Spanned
from manyformer.kernels.spans import DynamicSpans, FixedSpans, LearnedSpans, Spans
from manyformer.models import Embedding, Head, LanguageModel
from manyformer.position import Distances
from manyformer.recipes.registry import recipe
from manyformer.recipes.stacks import NormOrder, stack
from manyformer.sources import Trimmed


@recipe(
    "Adaptive attention span",
    paper="Sukhbaatar et al. 2019, Adaptive Attention Span in Transformers, arXiv:1905.07799",
    new="Each head learns how far it looks back, and computes no more.",
    task="language-model",
    causal=True,
    streams=True,
    cost="O(l z d + l d^2) per layer, z the span of its heads and their ramp",
    because={"cross": "a language model reads one sequence only"},
    small={"span": 24, "ramp": 8, "begin": 0.3},
)
def adaptive_span(
    vocab: int = 256,
    dim: int = 512,
    depth: int = 12,
    heads: int = 8,
    hidden: int | None = None,
    span: int = 8192,
    ramp: int = 32,
    begin: float = 0.0,
    price: float = 2e-6,
    spans: Literal["learned", "dynamic", "fixed"] = "learned",
    dropout: float = 0.3,
    norm: NormOrder = "post",
) -> LanguageModel:
    """The 12-layer model for characters by default; `hidden` is 4 dim unless given.

    Section 2 and table 1. Positions are vectors for each distance, one table for all layers. The price is of the mean
    span of each layer, in tokens, summed over layers. Text much longer than the span has to be given in one row, where
    the authors' segments are 512 tokens after a cache.
    """
    if dim % heads:
        raise UserError(f"dim ({dim}) must be a multiple of heads ({heads})")
    # one table for all layers
    position = Distances(dim // heads, span)

    def lengths() -> Spans:
        if spans == "fixed":
            return FixedSpans(heads, span, ramp=ramp)
        kind = LearnedSpans if spans == "learned" else DynamicSpans
        return kind(heads, span, ramp=ramp, begin=begin)

    def layer() -> dict[str, Layer]:
        found = lengths()
        kernel, source = Spanned(found, cost=price), Trimmed(found)
        attention = Attention(dim, heads, kernel, position=position, source=source, bias=False)
        return {"attention": attention, "ff": FeedForward(dim, hidden)}

    embed = Embedding(vocab, dim, scale=dim**0.5, dropout=dropout)
    body = stack(depth, layer, order=norm, norm=partial(nn.LayerNorm, dim), dropout=dropout)
    return LanguageModel(embed, body, Head(dim, vocab, tied=embed.token))
