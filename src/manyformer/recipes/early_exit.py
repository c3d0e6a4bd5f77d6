"""Early exit added to any language model or encoder-decoder, and the keywords of recipes that have it."""

from typing import Annotated, Any, TypedDict, TypeVar, Unpack

from manyformer.base.errors import UserError
from manyformer.models import EncoderDecoder, LanguageModel
from manyformer.models.exit_loss import ExitLossWeights
from manyformer.models.tasks.language_modelling import LANGUAGE_MODELLING
from manyformer.models.tasks.translation import TRANSLATION
from manyformer.models.with_early_exit import (
    DATA_KEYWORDS,
    ClassifierSharing,
    EarlyExitConfig,
    ExitRuleName,
    ExitThresholds,
    ExitTraining,
    OracleName,
    with_early_exit,
)
from manyformer.recipes.parts.keywords import Default, PositiveSize
from manyformer.recipes.parts.registry import build, get_recipe, recipe

PAPER = (
    "Elbayad et al. 2020, Depth-Adaptive Transformer, arXiv:1910.10073; "
    "Schuster et al. 2022, Confident Adaptive Language Modeling, arXiv:2207.07061"
)

_ROUNDED_CONFIDENCES = "rounding moves confidences near the threshold to its other side, so tokens exit at other layers"
ROUNDING_CHANGES_EXITS = {"float16": _ROUNDED_CONFIDENCES, "bfloat16": _ROUNDED_CONFIDENCES}

TINY = {"dim": 16, "depth": 3, "heads": 2, "ff_dim": 24, "dropout": 0.0}

GenerativeT = TypeVar("GenerativeT", LanguageModel, EncoderDecoder)

BaseRecipeKeyword = Annotated[str, "recipe of the model that early exit is added to"]

BaseKeywordsKeyword = Annotated[
    dict[str, Any] | None, "keywords of the base recipe, except those that the data may decide"
]

ThresholdKeyword = Annotated[
    ExitThresholds, "confidence at which a token exits, above 1 never; a list has one value for each layer but the last"
]

ThresholdDecayKeyword = Annotated[
    float | None, "rate at which the threshold decays along the horizon; null means constant"
]

HorizonKeyword = Annotated[PositiveSize, "longest output, along which a decaying threshold decreases"]

ClassifierSharingKeyword = Annotated[
    ClassifierSharing, "one output classifier shared by all layers, or one for each layer"
]


class ExitLearningOptions(TypedDict, total=False):
    """How the classifiers of all layers and the exits are trained."""

    exit_training: Annotated[
        ExitTraining,
        "every layer is trained on every token (aligned), or on randomly sampled exits (mixed)",
        Default("aligned"),
    ]
    mixed_samples: Annotated[
        PositiveSize, "number of random exit sequences of a mixed training, for each batch", Default(1)
    ]
    oracle: Annotated[
        OracleName,
        "how target exits are chosen: by the likelihood of the target, or by whether the prediction is correct",
        Default("correctness"),
    ]
    smoothing: Annotated[
        float,
        "width of the kernel that smooths an oracle's scores over neighbouring tokens; 0 means none",
        Default(1.0),
    ]
    layer_penalty: Annotated[float, "penalty of an oracle for each layer", Default(0.01)]
    exit_weight: Annotated[float, "weight in the loss of exit prediction", Default(0.1)]


class ExitRuleOptions(TypedDict, total=False):
    """When a token exits."""

    rule: Annotated[
        ExitRuleName,
        "exit rule: a measure of confidence, or a small classifier that predicts the exit layer",
        Default("softmax"),
    ]
    threshold: Annotated[ThresholdKeyword, Default(None)]
    threshold_decay: Annotated[ThresholdDecayKeyword, Default(None)]
    horizon: Annotated[HorizonKeyword, Default(100)]
    classifier_sharing: Annotated[ClassifierSharingKeyword, Default("shared")]
    layer_weights: Annotated[
        ExitLossWeights,
        "equal weights of all layers in the loss, or weights that rise with the layer",
        Default("rising"),
    ]


class EarlyExitOptions(ExitRuleOptions, ExitLearningOptions):
    """All settings of early exit; `manyformer.early_exit` describes them."""


@recipe(
    "Early exit (language model)",
    paper=PAPER,
    summary="Any language model; each token exits after the first layer that is confident.",
    task=LANGUAGE_MODELLING,
    family="depth",
    cost="that of the layers that a token is computed in, and keys and values of all",
    reasons=ROUNDING_CHANGES_EXITS,
    tiny_keywords={"base_keywords": TINY, "threshold": 0.02},
)
def early_exit_lm(
    vocab: int = 256,
    max_length: int | None = None,
    base_recipe: BaseRecipeKeyword = "transformer-lm",
    base_keywords: BaseKeywordsKeyword = None,
    **options: Unpack[EarlyExitOptions],
) -> LanguageModel:
    """The language model of the recipe `base_recipe` with keywords `base_keywords`, with early exit.

    `manyformer.early_exit` describes the other keywords; `mf.early_exit(model, ...)` does the same to an existing
    model."""
    config = EarlyExitConfig(**options)
    data_keywords = {"vocab": vocab, "max_length": max_length}
    expected = "a language model; early-exit-seq2seq is for encoder-decoders"
    return _wrap_base(LanguageModel, base_recipe, base_keywords, data_keywords, config, expected)


@recipe(
    "Early exit (encoder-decoder)",
    paper=PAPER,
    summary="Any encoder-decoder; each token exits the decoder after the first layer that is confident.",
    task=TRANSLATION,
    family="depth",
    cost="that of the layers that a token is computed in, and keys and values of all",
    reasons=ROUNDING_CHANGES_EXITS,
    tiny_keywords={"base_keywords": TINY, "threshold": 0.02},
)
def early_exit_seq2seq(
    vocab: int = 37000,
    source_vocab: int | None = None,
    max_length: int | None = None,
    base_recipe: BaseRecipeKeyword = "transformer",
    base_keywords: BaseKeywordsKeyword = None,
    **options: Unpack[EarlyExitOptions],
) -> EncoderDecoder:
    """The encoder-decoder of the recipe `base_recipe` with keywords `base_keywords`, with early exit.

    `manyformer.early_exit` describes the other keywords; `mf.early_exit(model, ...)` does the same to an existing
    model."""
    config = EarlyExitConfig(**options)
    data_keywords = {"vocab": vocab, "source_vocab": source_vocab, "max_length": max_length}
    expected = "an encoder-decoder; early-exit-lm is for language models"
    return _wrap_base(EncoderDecoder, base_recipe, base_keywords, data_keywords, config, expected)


def _wrap_base(
    model_class: type[GenerativeT],
    base_recipe: str,
    base_keywords: dict[str, Any] | None,
    data_keywords: dict[str, Any],
    config: EarlyExitConfig,
    expected: str,
) -> GenerativeT:
    """The model of the recipe `base_recipe` with early exit; data keywords that it does not have are dropped."""
    keywords = dict(base_keywords or {})
    parameters = get_recipe(base_recipe).signature.parameters
    # two places for one number could disagree, and a run takes it from the data
    if misplaced := [name for name in DATA_KEYWORDS if name in keywords]:
        raise UserError(
            f"base_keywords.{misplaced[0]} ({keywords[misplaced[0]]}) must be given as the keyword {misplaced[0]}"
        )
    # a keyword of the data that the base recipe does not have, such as max_length with sinusoids, is not for it
    model = build(
        base_recipe,
        **keywords,
        **{name: value for name, value in data_keywords.items() if name in parameters and value},
    )
    # the class is known only now: any recipe may be the base
    wrapped = with_early_exit(model, config)
    if not isinstance(wrapped, model_class):
        raise UserError(f"{base_recipe} is not {expected}")
    return wrapped
