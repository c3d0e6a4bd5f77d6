"""The depth-adaptive Transformer: a classifier after every layer, and a predictor of each token's exit layer."""

from typing import Annotated, Literal, Unpack

from manyformer.models import EncoderDecoder, LanguageModel
from manyformer.models.tasks.language_modelling import LANGUAGE_MODELLING
from manyformer.models.tasks.translation import TRANSLATION
from manyformer.models.with_early_exit import (
    ClassifierSharing,
    EarlyExitConfig,
    ExitRuleName,
    ExitThresholds,
    with_early_exit,
)
from manyformer.nn.masks import Causal
from manyformer.nn.softmax.softmax_kernel import SoftmaxKernel
from manyformer.recipes.early_exit import (
    ROUNDING_CHANGES_EXITS,
    ClassifierSharingKeyword,
    ExitLearningOptions,
    ThresholdKeyword,
)
from manyformer.recipes.parts.baselines import (
    NormOrder,
    attention_layers,
    encoder_decoder,
    language_model,
    learned_embedding,
)
from manyformer.recipes.parts.registry import recipe

ExitPredictorKind = Annotated[
    Literal["none", "sequence", "multinomial", "geometric", "likeliest"],
    "how the exit layer is predicted, for each token or for the whole sequence; none trains the classifiers alone",
]
TokenExitPredictorKind = Annotated[
    Literal["none", "multinomial", "geometric", "likeliest"],
    "how the exit layer of each token is predicted; none trains the classifiers alone",
]

PAPER = "Elbayad et al. 2020, Depth-Adaptive Transformer, arXiv:1910.10073"
SUMMARY = "Every layer can predict the next token; a small classifier predicts at which layer each token should exit."
COST = "O(l^2 d + l d^2) for each layer that a token is computed in; keys and values are computed in all"


@recipe(
    "Depth-adaptive Transformer",
    paper=PAPER,
    summary=SUMMARY,
    task=TRANSLATION,
    family="depth",
    cost=COST,
    reasons=ROUNDING_CHANGES_EXITS,
    tiny_keywords={"depth": 3},
)
def depth_adaptive_transformer(
    vocab: int = 10000,
    source_vocab: int | None = None,
    dim: int = 512,
    depth: int = 6,
    heads: int = 4,
    ff_dim: int | None = 1024,
    dropout: float = 0.3,
    norm_order: NormOrder = "post",
    predictor: ExitPredictorKind = "geometric",
    threshold: ThresholdKeyword = None,
    classifier_sharing: ClassifierSharingKeyword = "per-layer",
    **options: Unpack[ExitLearningOptions],
) -> EncoderDecoder:
    """The model for IWSLT'14 by default, whose decoder is half as wide in the paper. Sections 3 and 4.

    Trained in two stages: first with `predictor="none"`, where all classifiers are trained and no token exits early;
    then, starting from that run (`init_from`), with a predictor that learns the exits of the `oracle` with
    `exit_weight` in the loss. "geometric" has a threshold for all layers or one for each but the last (0.5), as has
    "likeliest" (0.9)."""
    # exits are the decoder's; the encoder is computed once for a whole output
    model = encoder_decoder(vocab, source_vocab, dim, depth, heads, ff_dim, dropout, norm_order)
    return with_early_exit(model, _exit_config(predictor, threshold, classifier_sharing, options))


@recipe(
    "Depth-adaptive Transformer (language model)",
    paper=PAPER,
    summary=SUMMARY,
    task=LANGUAGE_MODELLING,
    family="depth",
    cost=COST,
    reasons=ROUNDING_CHANGES_EXITS,
    tiny_keywords={"depth": 3},
)
def depth_adaptive_lm(
    vocab: int = 256,
    dim: int = 512,
    depth: int = 8,
    heads: int = 8,
    ff_dim: int | None = None,
    max_length: int = 1024,
    dropout: float = 0.1,
    norm_order: NormOrder = "pre",
    predictor: TokenExitPredictorKind = "geometric",
    threshold: ThresholdKeyword = None,
    classifier_sharing: ClassifierSharingKeyword = "shared",
    **options: Unpack[ExitLearningOptions],
) -> LanguageModel:
    """The decoder alone, as `transformer-lm`; the paper translates and can predict exits from the source."""
    embed = learned_embedding(vocab, dim, max_length, dropout=dropout)
    layer = attention_layers(dim, heads, ff_dim, lambda number: SoftmaxKernel(Causal()))
    model = language_model(embed, depth, layer, dropout=dropout, norm_order=norm_order)
    return with_early_exit(model, _exit_config(predictor, threshold, classifier_sharing, options))


def _exit_config(
    predictor: ExitPredictorKind, threshold: ExitThresholds, sharing: ClassifierSharing, options: ExitLearningOptions
) -> EarlyExitConfig:
    """The paper found equal weights of all layers to be best (section 3.1)."""
    rule: ExitRuleName = "never" if predictor == "none" else predictor
    return EarlyExitConfig(rule=rule, threshold=threshold, classifier_sharing=sharing, layer_weights="even", **options)
