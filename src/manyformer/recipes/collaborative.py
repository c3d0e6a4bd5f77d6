"""Collaborative attention: heads that share the dimensions of queries and keys, as a language model and an encoder."""

from typing import Literal

from torch import nn

from manyformer.core import Layer
from manyformer.feedforward import FeedForward
from manyformer.masks import Causal
from manyformer.mixers.collaborative import Collaborative
from manyformer.models import LanguageModel, MaskedLM
from manyformer.position import Learned
from manyformer.recipes.bert import masked_encoder
from manyformer.recipes.registry import recipe
from manyformer.recipes.stacks import NormOrder, small_std
from manyformer.recipes.transformer_lm import gpt

PAPER = "Cordonnier et al. 2020, Multi-Head Attention: Collaborate Instead of Concatenate, arXiv:2006.16362"
NEW = "Heads share the dimensions of queries and keys and mix them, which trained heads hardly use all of."


@recipe(
    "Collaborative attention",
    paper=PAPER,
    new=NEW,
    task="language-model",
    causal=True,
    streams=True,
    cost="O(l^2 (heads shared + d) + l d^2) per layer",
    because={"cross": "a language model reads one sequence only"},
    small={"shared": 12},
)
def collaborative(
    vocab: int = 256,
    dim: int = 512,
    depth: int = 8,
    heads: int = 8,
    hidden: int | None = None,
    shared: int | None = None,
    longest: int = 1024,
    dropout: float = 0.0,
    norm: NormOrder = "pre",
    gelu: Literal["exact", "tanh"] = "exact",
) -> LanguageModel:
    """`transformer-lm` with the attention of section 3; `shared` is a quarter of dim unless given.

    With as much the paper's translation models lose 0.2 BLEU (section 4.2). It saves parameters and what is kept of a
    token, not operations: every head multiplies queries and keys of the whole width. `manyformer collaborate` makes one
    of a trained `transformer-lm`.
    """
    width = quarter(dim, shared)

    def layer() -> dict[str, Layer]:
        return {
            "attention": Collaborative(dim, heads, Causal(), shared=width),
            "ff": FeedForward(dim, hidden, activation=nn.GELU("none" if gelu == "exact" else "tanh")),
        }

    return gpt(vocab, dim, depth, longest, layer, dropout=dropout, norm=norm)


@recipe(
    "Collaborative encoder",
    paper=PAPER,
    new=NEW,
    task="masked",
    cost="O(l^2 (heads shared + d) + l d^2) per layer",
    because={
        "causal": "every token sees both sides; `collaborative` is the causal one",
        "streams": "a later token changes all earlier outputs, so nothing can be kept",
        "cross": "it reads one sequence only",
    },
    small={"shared": 12},
)
def collaborative_encoder(
    vocab: int = 30522,
    dim: int = 768,
    depth: int = 12,
    heads: int = 12,
    hidden: int | None = None,
    shared: int | None = 256,
    longest: int = 512,
    dropout: float = 0.1,
) -> MaskedLM:
    """`bert` with the attention of section 3, with a third of the dimensions, which costs 1.5 percent of GLUE (4.3).

    `shared` null is a quarter of dim. `manyformer collaborate` makes one of a trained `bert`.
    """
    width = quarter(dim, shared)
    return masked_encoder(
        vocab,
        dim,
        depth,
        heads,
        hidden,
        dropout,
        embedded=Learned(dim, longest, std=small_std(dim)),
        mixer=lambda: Collaborative(dim, heads, shared=width),
    )


def quarter(dim: int, shared: int | None) -> int:
    """The shared width, a quarter of `dim` unless it is given."""
    return max(1, dim // 4) if shared is None else shared
