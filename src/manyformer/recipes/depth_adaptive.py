"""The depth-adaptive Transformer: a classifier after every layer, and a predictor of each token's exit layer."""

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Literal, Unpack

from torch import nn

from manyformer.attention import Attention
from manyformer.core import Layer
from manyformer.feedforward import FeedForward
from manyformer.kernels import SoftmaxKernel
from manyformer.masks import Causal
from manyformer.models import EncoderDecoder, LanguageModel
from manyformer.models.with_early_exit import EarlyExitConfig, ExitRuleName, with_early_exit
from manyformer.position import SinusoidalPosition
from manyformer.recipes.early_exit import ROUNDING_CHANGES_EXITS
from manyformer.recipes.exit_keywords import ClassifierSharingKeyword, ExitLearningOptions, ThresholdKeyword
from manyformer.recipes.registry import recipe
from manyformer.recipes.stacks import NormOrder
from manyformer.recipes.transformer import encoder_decoder
from manyformer.recipes.transformer_lm import gpt
from manyformer.tasks.language_modelling import LANGUAGE_MODELLING
from manyformer.tasks.translation import TRANSLATION

ExitPredictorKind = Annotated[
    Literal["none", "sequence", "multinomial", "geometric", "likeliest"],
    "how the exit layer is predicted, for each token or for the whole sequence; none trains the classifiers alone",
]
TokenExitPredictorKind = Annotated[
    Literal["none", "multinomial", "geometric", "likeliest"],
    "how the exit layer of each token is predicted; none trains the classifiers alone",
]

EXIT_RULES: Mapping[str, ExitRuleName] = {
    "none": "never",
    "sequence": "sequence",
    "multinomial": "multinomial",
    "geometric": "geometric",
    "likeliest": "likeliest",
}

PAPER = "Elbayad et al. 2020, Depth-Adaptive Transformer, arXiv:1910.10073"
SUMMARY = "Every layer can predict the next token; a small classifier predicts at which layer each token should exit."
COST = "O(l^2 d + l d^2) for each layer that a token is computed in; keys and values are computed in all"


@recipe(
    "Depth-adaptive Transformer",
    paper=PAPER,
    summary=SUMMARY,
    task=TRANSLATION,
    cost=COST,
    reasons={"float16": ROUNDING_CHANGES_EXITS, "bfloat16": ROUNDING_CHANGES_EXITS},
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
    "likeliest" (0.9).
    """
    model = encoder_decoder(
        vocab,
        source_vocab,
        dim,
        depth,
        heads,
        ff_dim,
        dropout,
        norm_order,
        make_position=partial(SinusoidalPosition, dim),
    )
    rule = EXIT_RULES[predictor]
    # the paper found equal weights of all layers to be best (section 3.1)
    config = EarlyExitConfig(
        rule=rule, threshold=threshold, classifier_sharing=classifier_sharing, layer_weights="even", **options
    )
    return with_early_exit(model, config)


@recipe(
    "Depth-adaptive Transformer (language model)",
    paper=PAPER,
    summary=SUMMARY,
    task=LANGUAGE_MODELLING,
    cost=COST,
    reasons={"float16": ROUNDING_CHANGES_EXITS, "bfloat16": ROUNDING_CHANGES_EXITS},
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

    def layer(number: int) -> dict[str, Layer]:
        ff = FeedForward(dim, ff_dim, activation=nn.GELU())
        return {"attention": Attention(dim, heads, SoftmaxKernel(Causal())), "ff": ff}

    model = gpt(vocab, dim, depth, max_length, layer, dropout=dropout, norm_order=norm_order)
    rule = EXIT_RULES[predictor]
    # the paper found equal weights of all layers to be best (section 3.1)
    config = EarlyExitConfig(
        rule=rule, threshold=threshold, classifier_sharing=classifier_sharing, layer_weights="even", **options
    )
    return with_early_exit(model, config)
