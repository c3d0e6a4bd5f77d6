"""Collaborative attention: heads share query and key dimensions, in a language model and an encoder."""

from typing import Annotated

from torch import nn

from manyformer.models import LanguageModel, MaskedLM
from manyformer.models.tasks.language_modelling import LANGUAGE_MODELLING
from manyformer.models.tasks.masked_language_modelling import MASKED_LM
from manyformer.nn.attention.collaborative_attention import CollaborativeAttention
from manyformer.nn.core import Layer
from manyformer.nn.feed_forward.feedforward import FeedForward
from manyformer.nn.masks import Causal
from manyformer.recipes.bert import masked_encoder
from manyformer.recipes.parts.baselines import NormOrder, language_model, learned_embedding
from manyformer.recipes.parts.keywords import GeluApproximation, PositiveSize
from manyformer.recipes.parts.registry import recipe

PAPER = "Cordonnier et al. 2020, Multi-Head Attention: Collaborate Instead of Concatenate, arXiv:2006.16362"
SUMMARY = "Heads share and mix the query and key dimensions, of which trained heads use only a part."

SharedDim = Annotated[
    PositiveSize | None, "number of query and key dimensions shared by all heads; null means a quarter of dim"
]


@recipe(
    "Collaborative attention",
    paper=PAPER,
    summary=SUMMARY,
    task=LANGUAGE_MODELLING,
    family="softmax",
    cost="O(l^2 (heads shared + d) + l d^2) per layer",
    tiny_keywords={"shared_dim": 12},
)
def collaborative(
    vocab: int = 256,
    dim: int = 512,
    depth: int = 8,
    heads: int = 8,
    ff_dim: int | None = None,
    shared_dim: SharedDim = None,
    max_length: int = 1024,
    dropout: float = 0.0,
    norm_order: NormOrder = "pre",
    gelu_approximate: GeluApproximation = "none",
) -> LanguageModel:
    """`transformer-lm` with the attention of section 3; `shared_dim` is a quarter of dim unless given.

    With a quarter the paper's translation models lose 0.2 BLEU (section 4.2). It saves parameters and cache, not
    operations: every head multiplies queries and keys of the whole shared width. `manyformer convert` makes one of a
    trained `transformer-lm`; other recipes have `shared_qk_dim` as a keyword."""
    width = default_shared_dim(dim, shared_dim)

    def layer(number: int) -> dict[str, Layer]:
        return {
            # one W_Q and W_K of the shared width for all heads, each of which weighs its dimensions
            "attention": CollaborativeAttention(dim, heads, Causal(), shared=width),
            "ff": FeedForward(dim, ff_dim, activation=nn.GELU(gelu_approximate)),
        }

    embed = learned_embedding(vocab, dim, max_length, dropout=dropout)
    return language_model(embed, depth, layer, dropout=dropout, norm_order=norm_order)


@recipe(
    "Collaborative encoder",
    paper=PAPER,
    summary=SUMMARY,
    task=MASKED_LM,
    family="softmax",
    cost="O(l^2 (heads shared + d) + l d^2) per layer",
    reasons={"causal": "every token attends to both sides; `collaborative` is the causal one"},
    tiny_keywords={"shared_dim": 12},
)
def collaborative_encoder(
    vocab: int = 30522,
    dim: int = 768,
    depth: int = 12,
    heads: int = 12,
    ff_dim: int | None = None,
    shared_dim: SharedDim = 256,
    max_length: int = 512,
    dropout: float = 0.1,
) -> MaskedLM:
    """`bert` with the attention of section 3 and a third of the dimensions, which costs 1.5 percent of GLUE (4.3).

    `shared_dim` null is a quarter of dim. `manyformer convert` makes one of a trained `bert`."""
    width = default_shared_dim(dim, shared_dim)

    def attention(number: int) -> Layer:
        return CollaborativeAttention(dim, heads, shared=width)

    return masked_encoder(vocab, dim, depth, heads, ff_dim, dropout, max_length=max_length, make_attention=attention)


def default_shared_dim(dim: int, shared_dim: int | None) -> int:
    """The shared width: a quarter of `dim` unless given."""
    if shared_dim is None:
        return max(1, dim // 4)
    return shared_dim
