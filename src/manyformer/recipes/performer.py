"""The Performer: softmax attention estimated by positive random features, as a language model and as an encoder."""

from typing import Literal

from manyformer.kernels import Linear
from manyformer.kernels.features import FeatureMap, Generalized, Positive
from manyformer.kernels.features.positive import Directions
from manyformer.masks import Causal
from manyformer.models import LanguageModel, MaskedLM
from manyformer.recipes.alike import language_model, masked_lm, sinusoids
from manyformer.recipes.registry import recipe
from manyformer.recipes.stacks import NormOrder

PAPER = "Choromanski et al. 2021, Rethinking Attention with Performers, arXiv:2009.14794"
NEW = "Positive, orthogonal random features estimate softmax attention without bias, in linear time."
SMALL = {"features": 32}

Estimated = Literal["softmax", "relu"]


@recipe(
    "Performer",
    paper=PAPER,
    new=NEW,
    task="language-model",
    causal=True,
    streams=True,
    cost="O(l features d + l d^2) per layer; O(features d + d^2) per written token, whatever came before",
    because={"cross": "a language model reads one sequence only"},
    small=SMALL,
)
def performer(
    vocab: int = 256,
    dim: int = 512,
    depth: int = 8,
    heads: int = 8,
    hidden: int | None = None,
    features: int = 256,
    kernel: Estimated = "softmax",
    directions: Directions = "orthogonal",
    redraw: int | None = 1000,
    dropout: float = 0.0,
    norm: NormOrder = "pre",
) -> LanguageModel:
    """Causal; sinusoids, else as `transformer-lm`. `kernel="relu"` is the generalised attention of section 4.

    Sections 2.3 and 2.4. Features are drawn anew after every `redraw` training steps. The published code scales all
    keys by the largest of the whole row, so that the future moves the past; here only the past sets the scale.
    """

    def attend() -> Linear:
        return Linear(_features(kernel, dim // heads, features, directions, redraw), Causal())

    embed = sinusoids(vocab, dim, dropout=dropout)
    return language_model(embed, depth, heads, hidden, attend, dropout=dropout, norm=norm)


@recipe(
    "Performer encoder",
    paper=PAPER,
    new=NEW,
    task="masked",
    cost="O(l features d + l d^2) per layer",
    because={
        "causal": "every token sees both sides; `performer` is the causal one",
        "streams": "a later token changes all earlier outputs, so nothing can be kept",
        "cross": "it reads one sequence only",
    },
    small=SMALL,
)
def performer_encoder(
    vocab: int = 256,
    dim: int = 512,
    depth: int = 8,
    heads: int = 8,
    hidden: int | None = None,
    features: int = 256,
    kernel: Estimated = "softmax",
    directions: Directions = "orthogonal",
    redraw: int | None = 1000,
    dropout: float = 0.1,
    norm: NormOrder = "pre",
) -> MaskedLM:
    """`performer` without the causal mask, for masked tokens, as the bidirectional protein models of section 4.3."""

    def attend() -> Linear:
        return Linear(_features(kernel, dim // heads, features, directions, redraw))

    embed = sinusoids(vocab, dim, dropout=dropout)
    return masked_lm(embed, depth, heads, hidden, attend, dropout=dropout, norm=norm)


def _features(kernel: Estimated, key: int, features: int, directions: Directions, redraw: int | None) -> FeatureMap:
    if kernel == "relu":
        return Generalized(key, features, directions=directions, redraw=redraw)
    return Positive(key, features, directions=directions, redraw=redraw)
