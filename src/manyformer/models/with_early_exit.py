"""Any model whose stack shows its layers, made one that tokens may leave early."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple, overload

from torch import nn

from manyformer.core import Chain, Layer
from manyformer.depth.early_exit_stack import EarlyExit
from manyformer.depth.exit_predictors import GeometricExitRule, LearnedExitRule, MultinomialExitRule, SequenceExitRule
from manyformer.depth.exit_rules import ExitRule, MarginExitRule, MaxProbabilityExitRule, NeverExit, SaturationExitRule
from manyformer.dropout import Dropout
from manyformer.errors import UserError
from manyformer.models import EncoderDecoder, LanguageModel, Model, ModelSpec, OutputHead
from manyformer.models.exit_classifiers import ExitClassifiers
from manyformer.models.exit_loss import AgreementLoss, ExitLoss, ExitLossWeights, ExitRuleLoss, OraclePredictionLoss
from manyformer.models.exit_oracles import CorrectnessOracle, LikelihoodOracle

ExitRuleName = Literal[
    "never", "softmax", "saturation", "classifier", "likeliest", "sequence", "multinomial", "geometric"
]
ExitThresholds = float | tuple[float, ...] | None
ClassifierSharing = Literal["shared", "own"]
ExitTraining = Literal["aligned", "mixed"]
OracleName = Literal["likelihood", "correctness"]

ORACLES = {"likelihood": LikelihoodOracle(), "correctness": CorrectnessOracle()}

DEFAULT_THRESHOLDS = {"geometric": 0.5}
"""Thresholds that papers give; otherwise `CONFIDENT`."""

CONFIDENT = 0.9

PREDICTIVE_RULES = ("sequence", "multinomial")
"""Rules that take the likeliest layer, and know no threshold."""


@dataclass(frozen=True, kw_only=True)
class EarlyExitConfig:
    """When tokens leave, and how that is learned; see `early_exit` for what the words mean."""

    rule: ExitRuleName = "softmax"
    threshold: ExitThresholds = None
    threshold_decay: float | None = None
    horizon: int = 100
    classifier_sharing: ClassifierSharing = "shared"
    layer_weights: ExitLossWeights = "rising"
    exit_training: ExitTraining = "aligned"
    mixed_samples: int = 1
    oracle: OracleName = "correctness"
    smoothing: float = 1.0
    layer_penalty: float = 0.01
    exit_weight: float = 0.1

    def values(self, depth: int) -> tuple[float, ...]:
        """The thresholds of all layers but the last. Raises UserError where they are not so many."""
        if self.rule in (*PREDICTIVE_RULES, "never"):
            if self.threshold is not None:
                raise UserError(f"rule '{self.rule}' knows no threshold ({self.threshold}): leave it out")
            return ()
        given = DEFAULT_THRESHOLDS.get(self.rule, CONFIDENT) if self.threshold is None else self.threshold
        values = tuple(map(float, given)) if isinstance(given, Sequence) else (float(given),) * (depth - 1)
        if len(values) != depth - 1:
            raise UserError(
                f"{len(values)} thresholds: there must be one for all layers, or one for each but the last, {depth - 1}"
            )
        if wrong := [value for value in values if not value >= 0]:
            raise UserError(f"threshold {wrong[0]} must be 0, where all leave, or more; above 1 nobody leaves")
        return values


def early_exit(
    model: Model,
    *,
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
) -> Model:
    """`model`, whose tokens may now leave its stack (of an encoder-decoder: the decoder's) after any layer.

    It has the very parts of `model`, trained or not, and can be trained, saved and checked as any other. `rule` says
    who leaves: measures of confidence with a `threshold` (0.9; above 1 nobody leaves, a tuple has one for each layer
    but the last) are "softmax" (the difference of the two largest probabilities), "saturation" (how parallel the stream
    stays), "likeliest" (the largest probability) and "classifier" (a unit trained last, with all else frozen);
    "geometric" (threshold 0.5), "multinomial" and "sequence" are trained with the model to foretell the layer; "never"
    lets nobody leave. A threshold with `threshold_decay` (4 in the paper) falls along the `horizon` (the longest
    output).

    All layers have the model's classifier, or, with "own", each a copy of it to begin with. They learn in "aligned"
    training from every layer, by `weights` alike or rising with their numbers, in "mixed" training from `mixed_samples`
    passes that tokens leave at random. Rules that foretell learn from an `oracle`: the layer at which what was right is
    likeliest, or is chosen, less `layer_penalty` a layer, its scores smoothed over neighbours; `exit_weight` weighs
    that. Raises UserError where the stack shows no layers, and for words that contradict each other."""
    leaving = EarlyExitConfig(
        rule=rule, threshold=threshold, threshold_decay=threshold_decay, horizon=horizon, classifier_sharing=classifier_sharing,
        layer_weights=layer_weights, exit_training=exit_training, mixed_samples=mixed_samples, oracle=oracle, smoothing=smoothing,
        layer_penalty=layer_penalty, exit_weight=exit_weight,
    )  # fmt: skip
    wrapped = with_early_exit(model, leaving)
    spec: ModelSpec | None = getattr(model, "spec", None)
    if spec is not None:
        wrapped.spec = _spec(
            spec, "early-exit-lm" if isinstance(model, LanguageModel) else "early-exit-seq2seq", leaving
        )
    return wrapped


@overload
def with_early_exit(model: LanguageModel, leaving: EarlyExitConfig) -> LanguageModel: ...
@overload
def with_early_exit(model: EncoderDecoder, leaving: EarlyExitConfig) -> EncoderDecoder: ...
@overload
def with_early_exit(model: Model, leaving: EarlyExitConfig) -> Model: ...
def with_early_exit(model: Model, leaving: EarlyExitConfig) -> Model:
    """`early_exit` without a recipe of its own."""
    _check(leaving)
    if isinstance(model, LanguageModel):
        layers, head, loss = _parts(model, model.body, model.head, leaving)
        wrapped: Model = LanguageModel(model.embed, layers, head, auxiliary=loss)
    elif isinstance(model, EncoderDecoder):
        layers, head, loss = _parts(model, model.decoder, model.head, leaving)
        sides = model.embed_source, model.encoder, model.embed_target
        wrapped = EncoderDecoder(*sides, layers, head, auxiliary=loss)
    else:
        raise UserError(f"a {type(model).__name__} writes nothing, so no token can leave it early")
    if leaving.rule == "classifier":
        _freeze(wrapped, layers.rule)
    wrapped.tokenizer = model.tokenizer
    return wrapped.train(model.training)


class EarlyExitParts(NamedTuple):
    """What a wrapped model has instead of its stack and its head, and what it learns besides."""

    layers: EarlyExit
    head: ExitClassifiers
    loss: ExitLoss


def _parts(
    model: LanguageModel | EncoderDecoder, body: Layer, head: OutputHead, leaving: EarlyExitConfig
) -> EarlyExitParts:
    if isinstance(body, EarlyExit):
        raise UserError(
            "tokens may leave this model early already; mf.load(folder, keywords=...) changes its threshold"
        )
    if not isinstance(body, Chain):
        raise UserError(f"no token can leave early: a {type(body).__name__} shows no layers to leave after")
    depth = sum(name.isdigit() for name, _ in body.named_children())
    if not depth:
        kinds = ", ".join(type(layer).__name__ for layer in body.children())
        raise UserError(f"no token can leave early: the stack is not layer after layer but one {kinds}")
    own = [copy.deepcopy(head) for _ in range(depth - 1)] if leaving.classifier_sharing == "own" else []
    exits = ExitClassifiers(head, own)
    rule = _rule(leaving, model, exits, depth)
    draws = leaving.mixed_samples if leaving.exit_training == "mixed" else None
    layers = EarlyExit(body, rule, draws=draws)
    # in its own stage nothing but the classifier of confidence learns
    weights = None if leaving.rule == "classifier" else "even" if draws else leaving.layer_weights
    return EarlyExitParts(layers, exits, ExitLoss(depth, weights, _exam(leaving, rule)))


def _rule(
    leaving: EarlyExitConfig, model: LanguageModel | EncoderDecoder, exits: ExitClassifiers, depth: int
) -> ExitRule:
    values = leaving.values(depth)
    dim = _width(model)
    fading: dict[str, Any] = {"decay": leaving.threshold_decay, "horizon": leaving.horizon}
    match leaving.rule:
        case "never":
            return NeverExit()
        case "softmax":
            return MarginExitRule(exits, values, **fading)
        case "likeliest":
            return MaxProbabilityExitRule(exits, values, **fading)
        case "saturation":
            return SaturationExitRule(values, **fading)
        case "classifier" | "geometric":
            return GeometricExitRule(dim, values, **fading)
        case "multinomial":
            return MultinomialExitRule(dim, depth)
        case "sequence":
            if not isinstance(model, EncoderDecoder):
                raise UserError(
                    "rule 'sequence' looks at the whole source, and a language model has none: take another"
                )
            return SequenceExitRule(dim, depth)


def _exam(leaving: EarlyExitConfig, rule: ExitRule) -> ExitRuleLoss | None:
    if leaving.rule == "classifier":
        assert isinstance(rule, GeometricExitRule)
        return AgreementLoss(rule)
    if not isinstance(rule, LearnedExitRule):
        return None
    return OraclePredictionLoss(
        rule,
        ORACLES[leaving.oracle],
        smoothing=leaving.smoothing,
        penalty=leaving.layer_penalty,
        weight=leaving.exit_weight,
    )


def _check(leaving: EarlyExitConfig) -> None:
    learned = leaving.rule in ("classifier", "sequence", "multinomial", "geometric")
    if leaving.exit_training == "mixed" and learned:
        raise UserError(
            f"mixed training is for the classifiers alone, not for rule '{leaving.rule}', which compares all layers: "
            "train with rule 'never' first, and begin an aligned training with that run (start)"
        )
    if leaving.threshold_decay is not None and leaving.rule in (*PREDICTIVE_RULES, "never"):
        raise UserError(
            f"rule '{leaving.rule}' knows no threshold that could fade ({leaving.threshold_decay}): leave it out"
        )
    for name in ("threshold_decay", "smoothing", "layer_penalty", "exit_weight"):
        value = getattr(leaving, name)
        if value is not None and not value >= 0:
            raise UserError(f"{name} ({value}) must be 0 or more")
    for name in ("horizon", "mixed_samples"):
        if getattr(leaving, name) < 1:
            raise UserError(f"{name} ({getattr(leaving, name)}) must be at least 1")


def _width(model: LanguageModel | EncoderDecoder) -> int:
    embed = model.embed if isinstance(model, LanguageModel) else model.embed_target
    return embed.token.embedding_dim


def _freeze(model: Model, rule: nn.Module) -> None:
    """Let nothing but the rule learn, from what the model makes of a text in earnest: without dropout."""
    own = set(rule.parameters())
    for weight in model.parameters():
        if weight not in own:
            weight.requires_grad = False
    for part in model.modules():
        if isinstance(part, Dropout):
            part.p = 0.0


DATA_KEYWORDS = ("vocab", "source_vocab", "max_length")
"""Keywords that data may decide; a recipe that wraps another has them itself."""


def _spec(inner: ModelSpec, recipe: str, leaving: EarlyExitConfig) -> ModelSpec:
    """The recipe that wraps, with the keywords of what is wrapped inside."""
    outside = {name: value for name, value in inner.keywords.items() if name in DATA_KEYWORDS}
    inside = {name: value for name, value in inner.keywords.items() if name not in DATA_KEYWORDS}
    words = {field.name: getattr(leaving, field.name) for field in fields(leaving)}
    return ModelSpec(recipe, {**outside, "base_recipe": inner.recipe, "base_keywords": inside, **words})
