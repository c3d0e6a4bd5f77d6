"""The Performer: softmax attention estimated by positive random features, as a language model and as an encoder."""

from collections.abc import Callable
from typing import Annotated, Literal, TypedDict, Unpack

from manyformer.models import LanguageModel, MaskedLM
from manyformer.models.tasks.language_modelling import LANGUAGE_MODELLING
from manyformer.models.tasks.masked_language_modelling import MASKED_LM
from manyformer.nn.linear import (
    FavorPlusFeatures,
    FeatureMap,
    GeneralizedFavorFeatures,
    HyperbolicFavorFeatures,
    TrigonometricFavorFeatures,
)
from manyformer.nn.linear.linear_kernel import LinearKernel
from manyformer.nn.linear.random_features import DirectionSampling
from manyformer.nn.masks import AllKeys, Causal, Mask
from manyformer.recipes.parts.baselines import (
    LayerMaker,
    NormOrder,
    attention_layers,
    language_model,
    masked_lm,
    sinusoidal_embedding,
)
from manyformer.recipes.parts.keywords import Default, FeatureCount, FeatureRedraw
from manyformer.recipes.parts.registry import recipe

PAPER = "Choromanski et al. 2021, Rethinking Attention with Performers, arXiv:2009.14794"
SUMMARY = "Positive, orthogonal random features estimate softmax attention without bias, in linear time."
TINY = {"features": 32}

FeatureKernelName = Literal["softmax", "hyperbolic", "trigonometric", "relu"]

FEATURES: dict[FeatureKernelName, tuple[Callable[..., FeatureMap], float]] = {
    "softmax": (FavorPlusFeatures, 1e-6),
    "hyperbolic": (HyperbolicFavorFeatures, 1e-6),
    # sums of signed weights may vanish
    "trigonometric": (TrigonometricFavorFeatures, 1e-3),
    "relu": (GeneralizedFavorFeatures, 1e-6),
}
"""The features of each kernel, and the minimum of their sums of weights."""


class PerformerOptions(TypedDict, total=False):
    """The keywords that both forms of the Performer share."""

    features: Annotated[FeatureCount, Default(256)]
    feature_kernel: Annotated[
        FeatureKernelName,
        "what random features estimate: softmax by positive (softmax), paired positive (hyperbolic) or signed "
        "(trigonometric) features, or the kernel of rectified ones (relu)",
        Default("softmax"),
    ]
    directions: Annotated[
        DirectionSampling,
        "random directions that are orthogonal in blocks, independent, or orthogonal with the length sqrt(dim / heads) "
        "(regularized)",
        Default("orthogonal"),
    ]
    redraw: Annotated[FeatureRedraw, Default(1000)]
    norm_order: Annotated[NormOrder, Default("pre")]


@recipe(
    "Performer",
    paper=PAPER,
    summary=SUMMARY,
    task=LANGUAGE_MODELLING,
    family="linear",
    constant_state=True,
    cost="O(l features d + l d^2) per layer; O(features d + d^2) per generated token, at any length",
    reasons={"attention_dropout": "keys and values are summed before any weight exists"},
    tiny_keywords=TINY,
)
def performer(
    vocab: int = 256,
    dim: int = 512,
    depth: int = 8,
    heads: int = 8,
    ff_dim: int | None = None,
    dropout: float = 0.0,
    **options: Unpack[PerformerOptions],
) -> LanguageModel:
    """Causal; sinusoids, else as `transformer-lm`. `feature_kernel="relu"` is the generalized attention of section 4.

    "hyperbolic" and "trigonometric" are the other estimators of section 2.3, the latter for contrast: its weights may
    be negative. Sections 2.3 and 2.4. Features are redrawn after every `redraw` training steps. The published code
    scales all keys by the maximum over the whole row, so that later tokens affect earlier ones; here the scale follows
    from the past alone. The recovery of a trained softmax model after short training was not reached in
    a small one: 0.16 nats remained after a tenth of its training (one seed, tinyshakespeare)."""

    # sinusoids: linear attention has no scores to which relative positions could be added
    embed = sinusoidal_embedding(vocab, dim, dropout=dropout)
    layer = _layers(dim, heads, ff_dim, options, Causal())
    return language_model(embed, depth, layer, dropout=dropout, norm_order=options["norm_order"])


@recipe(
    "Performer encoder",
    paper=PAPER,
    summary=SUMMARY,
    task=MASKED_LM,
    family="linear",
    cost="O(l features d + l d^2) per layer",
    reasons={
        "causal": "every token attends to both sides; `performer` is the causal one",
        "attention_dropout": "keys and values are summed before any weight exists",
    },
    tiny_keywords=TINY,
)
def performer_encoder(
    vocab: int = 256,
    dim: int = 512,
    depth: int = 8,
    heads: int = 8,
    ff_dim: int | None = None,
    dropout: float = 0.1,
    **options: Unpack[PerformerOptions],
) -> MaskedLM:
    """`performer` without the causal mask, for masked tokens, like the bidirectional protein models of section 4.3."""

    embed = sinusoidal_embedding(vocab, dim, dropout=dropout)
    layer = _layers(dim, heads, ff_dim, options, AllKeys())
    return masked_lm(embed, depth, layer, dropout=dropout, norm_order=options["norm_order"])


def _layers(dim: int, heads: int, ff_dim: int | None, options: PerformerOptions, mask: Mask) -> LayerMaker:
    make_features, floor = FEATURES[options["feature_kernel"]]

    def kernel(number: int) -> LinearKernel:
        # random for each layer: an unlucky draw then does not repeat itself all the way up
        features = make_features(
            dim // heads, options["features"], directions=options["directions"], redraw=options["redraw"]
        )
        return LinearKernel(features, mask, floor=floor)

    return attention_layers(dim, heads, ff_dim, kernel)
