"""Any language model or encoder-decoder, made one that tokens may leave early."""

from typing import Any, TypeVar

from manyformer.errors import UserError
from manyformer.models import EncoderDecoder, LanguageModel
from manyformer.models.exit_loss import LayerWeights
from manyformer.recipes.registry import build, get, recipe
from manyformer.recipes.wrapping import (
    OUTSIDE,
    Classifiers,
    Leaving,
    OracleName,
    RuleName,
    Thresholds,
    Training,
    wrap,
)

UNSURE = "a token that is about as sure as the threshold asks leaves at another layer where numbers are rounded"
PAPER = (
    "Elbayad et al. 2020, Depth-Adaptive Transformer, arXiv:1910.10073; "
    "Schuster et al. 2022, Confident Adaptive Language Modeling, arXiv:2207.07061"
)
Kind = TypeVar("Kind", LanguageModel, EncoderDecoder)
TINY = {"dim": 16, "depth": 3, "heads": 2, "hidden": 24, "dropout": 0.0}


@recipe(
    "Early exit (language model)",
    paper=PAPER,
    new="Any language model; each token leaves it after the layer at which it is sure.",
    task="language-model",
    causal=True,
    streams=True,
    cost="that of the layers that a token passes, and keys and values of all",
    because={
        "cross": "a language model reads one sequence only",
        "float16": UNSURE,
        "bfloat16": UNSURE,
    },
    small={"inner": TINY, "threshold": 0.02},
)
def early_exit_lm(
    vocab: int = 256,
    longest: int | None = None,
    of: str = "transformer-lm",
    inner: dict[str, Any] | None = None,
    rule: RuleName = "softmax",
    threshold: Thresholds = None,
    fade: float | None = None,
    horizon: int = 100,
    classifiers: Classifiers = "shared",
    layer_weights: LayerWeights = "rising",
    training: Training = "aligned",
    draws: int = 1,
    oracle: OracleName = "correctness",
    smoothing: float = 1.0,
    penalty: float = 0.01,
    exit_weight: float = 0.1,
) -> LanguageModel:
    """The language model of the recipe `of` with keywords `inner`; `manyformer.early_exit` says what the rest is.

    `mf.early_exit(model, ...)` makes one of a model that is there already.
    """
    leaving = Leaving(
        rule=rule, threshold=threshold, fade=fade, horizon=horizon, classifiers=classifiers,
        layer_weights=layer_weights, training=training, draws=draws, oracle=oracle, smoothing=smoothing,
        penalty=penalty, exit_weight=exit_weight,
    )  # fmt: skip
    outside = {"vocab": vocab, "longest": longest}
    otherwise = "language model; early-exit-seq2seq is for encoder-decoders"
    return _wrapped(LanguageModel, of, inner, outside, leaving, otherwise)


@recipe(
    "Early exit (encoder-decoder)",
    paper=PAPER,
    new="Any encoder-decoder; each token leaves the decoder after the layer at which it is sure.",
    task="translation",
    causal=True,
    streams=True,
    cross=True,
    cost="that of the layers that a token passes, and keys and values of all",
    because={"float16": UNSURE, "bfloat16": UNSURE},
    small={"inner": TINY, "threshold": 0.02},
)
def early_exit_seq2seq(
    vocab: int = 37000,
    source_vocab: int | None = None,
    longest: int | None = None,
    of: str = "transformer",
    inner: dict[str, Any] | None = None,
    rule: RuleName = "softmax",
    threshold: Thresholds = None,
    fade: float | None = None,
    horizon: int = 100,
    classifiers: Classifiers = "shared",
    layer_weights: LayerWeights = "rising",
    training: Training = "aligned",
    draws: int = 1,
    oracle: OracleName = "correctness",
    smoothing: float = 1.0,
    penalty: float = 0.01,
    exit_weight: float = 0.1,
) -> EncoderDecoder:
    """The encoder-decoder of the recipe `of` with keywords `inner`; `manyformer.early_exit` says what the rest is.

    `mf.early_exit(model, ...)` makes one of a model that is there already.
    """
    leaving = Leaving(
        rule=rule, threshold=threshold, fade=fade, horizon=horizon, classifiers=classifiers,
        layer_weights=layer_weights, training=training, draws=draws, oracle=oracle, smoothing=smoothing,
        penalty=penalty, exit_weight=exit_weight,
    )  # fmt: skip
    outside = {"vocab": vocab, "source_vocab": source_vocab, "longest": longest}
    otherwise = "encoder-decoder; early-exit-lm is for language models"
    return _wrapped(EncoderDecoder, of, inner, outside, leaving, otherwise)


def _wrapped(
    kind: type[Kind],
    of: str,
    inner: dict[str, Any] | None,
    outside: dict[str, Any],
    leaving: Leaving,
    otherwise: str,
) -> Kind:
    """The model of the recipe `of`, wrapped; where any length will do, `longest` has no use."""
    keywords, known = dict(inner or {}), get(of).signature.parameters
    if wrong := [name for name in OUTSIDE if name in keywords]:
        raise UserError(f"inner.{wrong[0]} ({keywords[wrong[0]]}) is a keyword of its own: give {wrong[0]}")
    model = build(of, **keywords, **{name: value for name, value in outside.items() if name in known and value})
    wrapped = wrap(model, leaving)
    if not isinstance(wrapped, kind):
        raise UserError(f"{of} is no {otherwise}")
    return wrapped
