"""The decoder-only Transformer language model."""

from collections.abc import Callable
from functools import partial
from typing import Literal

from torch import nn

from manyformer.attention import Attention
from manyformer.core import Layer
from manyformer.feedforward import FeedForward, in_pieces
from manyformer.kernels import Softmax
from manyformer.masks import Causal
from manyformer.models import Head, LanguageModel
from manyformer.recipes.alike import learned
from manyformer.recipes.registry import recipe
from manyformer.recipes.stacks import NormOrder, Streams, shrink_outputs, small_std, stack


@recipe(
    "Transformer language model",
    paper="Radford et al. 2019, Language Models are Unsupervised Multitask Learners; Liu et al. 2018, arXiv:1801.10198",
    new="The decoder alone, without cross-attention, is a language model.",
    task="language-model",
    causal=True,
    streams=True,
    cost="O(l^2 d + l d^2) per layer",
    because={"cross": "a language model reads one sequence only"},
)
def transformer_lm(
    vocab: int = 256,
    dim: int = 512,
    depth: int = 8,
    heads: int = 8,
    hidden: int | None = None,
    longest: int = 1024,
    dropout: float = 0.0,
    norm: NormOrder = "pre",
    gelu: Literal["exact", "tanh"] = "exact",
    residual: Streams = "plain",
    ff_chunk: int | None = None,
) -> LanguageModel:
    """Pre-norm, GELU, learned positions, tied output, as in GPT-2; `hidden` is 4 dim unless given.

    Attention weights have no dropout, unlike GPT-2's: on a CPU it costs six times the attention itself. GPT-2 takes
    `gelu="tanh"`, an approximation to within 5e-4 that on a CPU costs three times the exact function. Reversible layers
    and feed-forwards in pieces (Kitaev et al. 2020, section 3) save memory.
    """

    form = "none" if gelu == "exact" else "tanh"

    def layer() -> dict[str, Layer]:
        return {
            "attention": Attention(dim, heads, Softmax(Causal())),
            "ff": in_pieces(FeedForward(dim, hidden, activation=nn.GELU(form)), ff_chunk),
        }

    return gpt(vocab, dim, depth, longest, layer, dropout=dropout, norm=norm, streams=residual)


def gpt(
    vocab: int,
    dim: int,
    depth: int,
    longest: int,
    layer: Callable[[], dict[str, Layer]],
    *,
    dropout: float,
    norm: NormOrder,
    streams: Streams = "plain",
) -> LanguageModel:
    """GPT-2 with the branches that `layer` makes for each layer."""
    embed = learned(vocab, dim, longest, dropout=dropout)
    body = stack(depth, layer, order=norm, norm=partial(nn.LayerNorm, dim), dropout=dropout, streams=streams)
    shrink_outputs(body, depth, std=small_std(dim))
    return LanguageModel(embed, body, Head(dim, vocab, tied=embed.token))
