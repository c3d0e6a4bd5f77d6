"""Any language model or encoder-decoder, made one that tokens may leave early."""

from typing import Any, TypeVar

from manyformer.errors import UserError
from manyformer.models import EncoderDecoder, LanguageModel
from manyformer.models.exit_loss import ExitLossWeights
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
from manyformer.recipes.registry import build, get_recipe, recipe

UNSURE = "a token that is about as sure as the threshold asks leaves at another layer where numbers are rounded"
PAPER = (
    "Elbayad et al. 2020, Depth-Adaptive Transformer, arXiv:1910.10073; "
    "Schuster et al. 2022, Confident Adaptive Language Modeling, arXiv:2207.07061"
)
GenerativeModel = TypeVar("GenerativeModel", LanguageModel, EncoderDecoder)
TINY = {"dim": 16, "depth": 3, "heads": 2, "ff_dim": 24, "dropout": 0.0}


@recipe(
    "Early exit (language model)",
    paper=PAPER,
    summary="Any language model; each token leaves it after the layer at which it is sure.",
    task="language-model",
    causal=True,
    incremental_decoding=True,
    cost="that of the layers that a token passes, and keys and values of all",
    reasons={
        "cross_attention": "a language model reads one sequence only",
        "float16": UNSURE,
        "bfloat16": UNSURE,
    },
    tiny_keywords={"base_keywords": TINY, "threshold": 0.02},
)
def early_exit_lm(
    vocab: int = 256,
    max_length: int | None = None,
    base_recipe: str = "transformer-lm",
    base_keywords: dict[str, Any] | None = None,
    rule: ExitRuleName = "softmax",
    threshold: ExitThresholds = None,
    threshold_decay: float | None = None,
    horizon: int = 100,
    classifier_sharing: ClassifierSharing = "shared",
    layer_weights: ExitLossWeights = "rising",
    exit_training: ExitTraining = "aligned",
    mixed_samples: int = 1,
    oracle: OracleName = "correctness",
    smoothing: float = 1.0,
    layer_penalty: float = 0.01,
    exit_weight: float = 0.1,
) -> LanguageModel:
    """The language model of the recipe `base_recipe` with keywords `base_keywords`; `manyformer.early_exit` says what
    the rest is.

    `mf.early_exit(model, ...)` makes one of a model that is there already.
    """
    leaving = EarlyExitConfig(
        rule=rule, threshold=threshold, threshold_decay=threshold_decay, horizon=horizon, classifier_sharing=classifier_sharing,
        layer_weights=layer_weights, exit_training=exit_training, mixed_samples=mixed_samples, oracle=oracle, smoothing=smoothing,
        layer_penalty=layer_penalty, exit_weight=exit_weight,
    )  # fmt: skip
    outside = {"vocab": vocab, "max_length": max_length}
    otherwise = "language model; early-exit-seq2seq is for encoder-decoders"
    return _wrapped(LanguageModel, base_recipe, base_keywords, outside, leaving, otherwise)


@recipe(
    "Early exit (encoder-decoder)",
    paper=PAPER,
    summary="Any encoder-decoder; each token leaves the decoder after the layer at which it is sure.",
    task="translation",
    causal=True,
    incremental_decoding=True,
    cross_attention=True,
    cost="that of the layers that a token passes, and keys and values of all",
    reasons={"float16": UNSURE, "bfloat16": UNSURE},
    tiny_keywords={"base_keywords": TINY, "threshold": 0.02},
)
def early_exit_seq2seq(
    vocab: int = 37000,
    source_vocab: int | None = None,
    max_length: int | None = None,
    base_recipe: str = "transformer",
    base_keywords: dict[str, Any] | None = None,
    rule: ExitRuleName = "softmax",
    threshold: ExitThresholds = None,
    threshold_decay: float | None = None,
    horizon: int = 100,
    classifier_sharing: ClassifierSharing = "shared",
    layer_weights: ExitLossWeights = "rising",
    exit_training: ExitTraining = "aligned",
    mixed_samples: int = 1,
    oracle: OracleName = "correctness",
    smoothing: float = 1.0,
    layer_penalty: float = 0.01,
    exit_weight: float = 0.1,
) -> EncoderDecoder:
    """The encoder-decoder of the recipe `base_recipe` with keywords `base_keywords`; `manyformer.early_exit` says what
    the rest is.

    `mf.early_exit(model, ...)` makes one of a model that is there already.
    """
    leaving = EarlyExitConfig(
        rule=rule, threshold=threshold, threshold_decay=threshold_decay, horizon=horizon, classifier_sharing=classifier_sharing,
        layer_weights=layer_weights, exit_training=exit_training, mixed_samples=mixed_samples, oracle=oracle, smoothing=smoothing,
        layer_penalty=layer_penalty, exit_weight=exit_weight,
    )  # fmt: skip
    outside = {"vocab": vocab, "source_vocab": source_vocab, "max_length": max_length}
    otherwise = "encoder-decoder; early-exit-lm is for language models"
    return _wrapped(EncoderDecoder, base_recipe, base_keywords, outside, leaving, otherwise)


def _wrapped(
    kind: type[GenerativeModel],
    of: str,
    inner: dict[str, Any] | None,
    outside: dict[str, Any],
    leaving: EarlyExitConfig,
    otherwise: str,
) -> GenerativeModel:
    """The model of the recipe `base_recipe`, wrapped; where any length will do, `max_length` has no use."""
    keywords, known = dict(inner or {}), get_recipe(of).signature.parameters
    if wrong := [name for name in DATA_KEYWORDS if name in keywords]:
        raise UserError(f"inner.{wrong[0]} ({keywords[wrong[0]]}) is a keyword of its own: give {wrong[0]}")
    model = build(of, **keywords, **{name: value for name, value in outside.items() if name in known and value})
    wrapped = with_early_exit(model, leaving)
    if not isinstance(wrapped, kind):
        raise UserError(f"{of} is no {otherwise}")
    return wrapped
