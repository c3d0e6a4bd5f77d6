"""Random feature attention: softmax over unit vectors estimated by sines and cosines, with a gate that forgets."""

from typing import Literal

from manyformer.kernels import Linear
from manyformer.kernels.features import ArcCosine, Fourier
from manyformer.kernels.rules import Gated, Sum
from manyformer.masks import Causal
from manyformer.models import LanguageModel
from manyformer.recipes.alike import language_model, sinusoids
from manyformer.recipes.registry import recipe
from manyformer.recipes.stacks import NormOrder

FLOOR = 0.1
"""Sums of weights nearer to 0 count as this much, in every form alike; the published code has three different rules.

With 0.001 a few tokens whose sums happen to vanish make all of the gradient: a toy task that is at 1.50 nats after 200
steps was at 1.74.
"""


@recipe(
    "Random feature attention",
    paper="Peng et al. 2021, Random Feature Attention, arXiv:2103.02143",
    new="Random Fourier features of unit vectors for softmax, and a learned gate that lets the memory forget.",
    task="language-model",
    causal=True,
    streams=True,
    cost="O(l features d + l d^2) per layer; O(features d + d^2) per written token, whatever came before",
    because={"cross": "a language model reads one sequence only"},
    small={"features": 64},
)
def rfa(
    vocab: int = 256,
    dim: int = 512,
    depth: int = 8,
    heads: int = 8,
    hidden: int | None = None,
    features: int = 128,
    kernel: Literal["gaussian", "arccos"] = "gaussian",
    memory: Literal["gated", "sum"] = "gated",
    redraw: int | None = 1,
    dropout: float = 0.0,
    norm: NormOrder = "pre",
) -> LanguageModel:
    """RFA-Gate of section 3.2 by default; sinusoids, else as `transformer-lm`.

    `features` counts sines and cosines. Each head has directions of its own, drawn anew after every `redraw` training
    steps, where the published code chooses among 500 sets at each step.
    """

    def attend() -> Linear:
        chosen = Fourier if kernel == "gaussian" else ArcCosine
        random = chosen(dim // heads, features, heads=heads, redraw=redraw)
        return Linear(random, Causal(), rule=Gated() if memory == "gated" else Sum(), floor=FLOOR)

    embed = sinusoids(vocab, dim, dropout=dropout)
    return language_model(embed, depth, heads, hidden, attend, dropout=dropout, norm=norm)
