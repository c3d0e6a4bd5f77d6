"""The Performer: softmax attention estimated by positive random features, as a language model and as an encoder."""

from typing import Annotated, Literal

from manyformer.kernels import LinearKernel
from manyformer.kernels.features import FavorPlusFeatures, FeatureMap, GeneralizedFavorFeatures
from manyformer.kernels.features.favor import DirectionSampling
from manyformer.masks import Causal
from manyformer.models import LanguageModel, MaskedLM
from manyformer.recipes.baselines import language_model, masked_lm, sinusoidal_embedding
from manyformer.recipes.keywords import FeatureCount, FeatureRedraw
from manyformer.recipes.registry import recipe
from manyformer.recipes.stacks import NormOrder
from manyformer.tasks.language_modelling import LANGUAGE_MODELLING
from manyformer.tasks.masked_language_modelling import MASKED_LM

PAPER = "Choromanski et al. 2021, Rethinking Attention with Performers, arXiv:2009.14794"
SUMMARY = "Positive, orthogonal random features estimate softmax attention without bias, in linear time."
TINY = {"features": 32}

FavorKernel = Annotated[Literal["softmax", "relu"], "the kernel function that random features approximate"]

Directions = Annotated[DirectionSampling, "random directions that are orthogonal in blocks, or independent"]


@recipe(
    "Performer",
    paper=PAPER,
    summary=SUMMARY,
    task=LANGUAGE_MODELLING,
    cost="O(l features d + l d^2) per layer; O(features d + d^2) per generated token, at any length",
    tiny_keywords=TINY,
)
def performer(
    vocab: int = 256,
    dim: int = 512,
    depth: int = 8,
    heads: int = 8,
    ff_dim: int | None = None,
    features: FeatureCount = 256,
    feature_kernel: FavorKernel = "softmax",
    directions: Directions = "orthogonal",
    redraw: FeatureRedraw = 1000,
    dropout: float = 0.0,
    norm_order: NormOrder = "pre",
) -> LanguageModel:
    """Causal; sinusoids, else as `transformer-lm`. `feature_kernel="relu"` is the generalized attention of section 4.

    Sections 2.3 and 2.4. Features are redrawn after every `redraw` training steps. The published code scales all keys
    by the maximum over the whole row, so that later tokens affect earlier ones; here the scale follows from the past
    alone."""

    def make_kernel(number: int) -> LinearKernel:
        return LinearKernel(_feature_map(feature_kernel, dim // heads, features, directions, redraw), Causal())

    embed = sinusoidal_embedding(vocab, dim, dropout=dropout)
    return language_model(embed, depth, heads, ff_dim, make_kernel, dropout=dropout, norm_order=norm_order)


@recipe(
    "Performer encoder",
    paper=PAPER,
    summary=SUMMARY,
    task=MASKED_LM,
    cost="O(l features d + l d^2) per layer",
    reasons={"causal": "every token attends to both sides; `performer` is the causal one"},
    tiny_keywords=TINY,
)
def performer_encoder(
    vocab: int = 256,
    dim: int = 512,
    depth: int = 8,
    heads: int = 8,
    ff_dim: int | None = None,
    features: FeatureCount = 256,
    feature_kernel: FavorKernel = "softmax",
    directions: Directions = "orthogonal",
    redraw: FeatureRedraw = 1000,
    dropout: float = 0.1,
    norm_order: NormOrder = "pre",
) -> MaskedLM:
    """`performer` without the causal mask, for masked tokens, like the bidirectional protein models of section 4.3."""

    def make_kernel(number: int) -> LinearKernel:
        return LinearKernel(_feature_map(feature_kernel, dim // heads, features, directions, redraw))

    embed = sinusoidal_embedding(vocab, dim, dropout=dropout)
    return masked_lm(embed, depth, heads, ff_dim, make_kernel, dropout=dropout, norm_order=norm_order)


def _feature_map(
    feature_kernel: FavorKernel, head_dim: int, features: int, directions: DirectionSampling, redraw: int | None
) -> FeatureMap:
    if feature_kernel == "relu":
        return GeneralizedFavorFeatures(head_dim, features, directions=directions, redraw=redraw)
    return FavorPlusFeatures(head_dim, features, directions=directions, redraw=redraw)
