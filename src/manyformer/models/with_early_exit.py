"""Conversion of a model with a layered stack to one whose tokens may exit early."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeVar, cast

from torch import nn

from manyformer.base.errors import UserError
from manyformer.models import EncoderDecoder, GenerativeModel, LanguageModel, Model, ModelSpec
from manyformer.models.exit_classifiers import ExitClassifiers
from manyformer.models.exit_loss import (
    ORACLES,
    AgreementLoss,
    ExitLoss,
    ExitLossWeights,
    ExitRuleLoss,
    OraclePredictionLoss,
)
from manyformer.models.generative_model import as_generative
from manyformer.nn.core import Chain, Layer
from manyformer.nn.depth.early_exit_stack import EarlyExit
from manyformer.nn.depth.exit_rules import (
    ExitRule,
    GeometricExitRule,
    LearnedExitRule,
    MarginExitRule,
    MaxProbabilityExitRule,
    MultinomialExitRule,
    NeverExit,
    SaturationExitRule,
    SequenceExitRule,
)
from manyformer.nn.runtime.dropout import Dropout

M = TypeVar("M", bound=Model)

ExitRuleName = Literal[
    "never", "softmax", "saturation", "classifier", "likeliest", "sequence", "multinomial", "geometric"
]
ExitThresholds = float | tuple[float, ...] | None
ClassifierSharing = Literal["shared", "per-layer"]
ExitTraining = Literal["aligned", "mixed"]
OracleName = Literal["likelihood", "correctness"]

DEFAULT_THRESHOLDS = {"geometric": 0.5}
"""The thresholds that papers give; other rules have `DEFAULT_CONFIDENCE`."""

DEFAULT_CONFIDENCE = 0.9

PREDICTIVE_RULES = ("sequence", "multinomial")
"""Rules that predict the exit layer and have no threshold."""


@dataclass(frozen=True, kw_only=True)
class EarlyExitConfig:
    """The settings of early exit; see `early_exit` for their meaning."""

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

    def layer_thresholds(self, depth: int) -> tuple[float, ...]:
        """The thresholds of all layers but the last. Raises UserError for a wrong number of thresholds."""
        if self.rule in (*PREDICTIVE_RULES, "never"):
            if self.threshold is not None:
                raise UserError(f"rule '{self.rule}' has no threshold ({self.threshold}): leave it out")
            return ()
        threshold = DEFAULT_THRESHOLDS.get(self.rule, DEFAULT_CONFIDENCE) if self.threshold is None else self.threshold
        values = tuple(map(float, threshold)) if isinstance(threshold, Sequence) else (float(threshold),) * (depth - 1)
        if len(values) != depth - 1:
            raise UserError(
                f"{len(values)} thresholds: there must be one for all layers, or one for each but the last, {depth - 1}"
            )
        if negative := [value for value in values if not value >= 0]:
            raise UserError(f"threshold {negative[0]} must be at least 0 (all tokens exit); above 1 no token exits")
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
    """Convert `model` so that tokens may exit its stack (of an encoder-decoder: the decoder's) after any layer.

    The result shares the modules of `model`, trained or not, and can be trained, saved and checked like any model.
    `rule` selects the tokens that exit. Confidence measures with a `threshold` (0.9; above 1 no token exits, a tuple
    has one for each layer but the last) are "softmax" (the difference of the two largest probabilities), "saturation"
    (the cosine similarity of successive hidden states), "likeliest" (the largest probability) and "classifier" (a unit
    trained last, with all other weights frozen); "geometric" (threshold 0.5), "multinomial" and "sequence" are trained
    with the model to predict the exit layer; with "never" no token exits. With `threshold_decay` (4 in the paper) a
    threshold decreases over the `horizon` (the longest output).

    All layers share the model's classifier, or, with "per-layer", each starts with a copy of it. In "aligned" training
    they learn from every layer, with `layer_weights` even or rising with the layer's number, in "mixed" training from
    `mixed_samples` passes with random exits. Rules that predict the layer learn from an `oracle`: the layer with the
    highest likelihood, or a correct prediction, of the target, minus `layer_penalty` per layer, with scores smoothed
    over neighboring tokens; `exit_weight` is the weight of that loss. Raises UserError for a stack without separate
    layers, and for settings that contradict each other."""
    config = EarlyExitConfig(
        rule=rule, threshold=threshold, threshold_decay=threshold_decay, horizon=horizon,
        classifier_sharing=classifier_sharing, layer_weights=layer_weights, exit_training=exit_training,
        mixed_samples=mixed_samples, oracle=oracle, smoothing=smoothing, layer_penalty=layer_penalty,
        exit_weight=exit_weight,
    )  # fmt: skip
    wrapped = with_early_exit(model, config)
    spec: ModelSpec | None = getattr(model, "spec", None)
    if spec is not None:
        recipe = "early-exit-seq2seq"
        if isinstance(model, LanguageModel):
            recipe = "early-exit-lm"
        wrapped.spec = _build_spec(spec, recipe, config)
    return wrapped


def with_early_exit(model: M, config: EarlyExitConfig) -> M:
    """`early_exit` for a config, without setting the `spec` of the result."""
    _check_config(config)
    generative = as_generative(model, "have early exits")
    if find_early_exits(model) is not None:
        raise UserError("this model has early exits already; mf.load(folder, keywords=...) changes its threshold")
    body = _check_stack(generative.decoder_stack)
    head = model.head
    depth = sum(name.isdigit() for name, _ in body.named_children())
    if config.classifier_sharing == "per-layer":
        # tensors without numbers belong to a mode, which is not to be copied with them
        modes = [getattr(weight, "fake_mode", None) for weight in head.parameters()]
        copies = [copy.deepcopy(head, {id(mode): mode for mode in modes if mode is not None}) for _ in range(depth - 1)]
    else:
        copies = []
    # the head of the model is that of the last layer, so that without exits nothing changes
    exits = ExitClassifiers(head, copies, aligned=config.exit_training != "mixed")
    rule = _build_rule(config, generative, exits, depth)
    mixed_samples = None
    if config.exit_training == "mixed":
        mixed_samples = config.mixed_samples
    # in its separate training stage only the confidence classifier is trained
    weights = None
    if config.rule != "classifier":
        weights = "even" if mixed_samples else config.layer_weights
    loss = ExitLoss(depth, weights, _build_rule_loss(config, rule))
    wrapped = cast(M, generative.with_decoder(EarlyExit(body, rule, mixed_samples=mixed_samples), exits, loss))
    if config.rule == "classifier":
        _freeze(wrapped, rule)
    # the modules are shared, but a new model has no tokenizer and is in training mode
    wrapped.tokenizer = model.tokenizer
    return wrapped.train(model.training)


def find_early_exits(model: Model) -> EarlyExit | None:
    """The stack of a model with early exits; None for all others."""
    stack = None
    if isinstance(model, GenerativeModel):
        stack = model.decoder_stack
    if isinstance(stack, EarlyExit):
        return stack
    return None


def _check_stack(body: Layer) -> Chain:
    """The stack as a chain of numbered layers. Raises UserError for any other."""
    if not isinstance(body, Chain):
        raise UserError(
            f"early exit needs a Chain of layers, and a {type(body).__name__} is none: use residual_streams=plain, and "
            "no skips between layers"
        )
    if any(getattr(module, "reads_token_ids", False) for module in body.modules()):
        raise UserError("early exit copies streams to the layers above, and these look tokens up: leave that out")
    if not any(name.isdigit() for name, _ in body.named_children()):
        kinds = ", ".join(type(layer).__name__ for layer in body.children())
        raise UserError(f"early exit needs a chain of numbered layers, and this stack is one {kinds}")
    return body


def _build_rule(config: EarlyExitConfig, model: GenerativeModel, exits: ExitClassifiers, depth: int) -> ExitRule:
    thresholds = config.layer_thresholds(depth)
    dim = model.decoder_embed.token.embedding_dim
    decay_options: dict[str, Any] = {"decay": config.threshold_decay, "horizon": config.horizon}
    match config.rule:
        case "never":
            return NeverExit()
        case "softmax":
            return MarginExitRule(exits, thresholds, **decay_options)
        case "likeliest":
            return MaxProbabilityExitRule(exits, thresholds, **decay_options)
        case "saturation":
            return SaturationExitRule(thresholds, **decay_options)
        case "classifier" | "geometric":
            return GeometricExitRule(dim, thresholds, **decay_options)
        case "multinomial":
            return MultinomialExitRule(dim, depth)
        case "sequence":
            if not isinstance(model, EncoderDecoder):
                raise UserError(
                    "rule 'sequence' needs the encoder's output, which a language model does not have: choose another"
                )
            return SequenceExitRule(dim, depth)


def _build_rule_loss(config: EarlyExitConfig, rule: ExitRule) -> ExitRuleLoss | None:
    if config.rule == "classifier":
        assert isinstance(rule, GeometricExitRule)
        return AgreementLoss(rule)
    if not isinstance(rule, LearnedExitRule):
        return None
    oracle = ORACLES[config.oracle]
    smoothing = config.smoothing
    penalty = config.layer_penalty
    return OraclePredictionLoss(rule, oracle, smoothing=smoothing, layer_penalty=penalty, weight=config.exit_weight)


def _check_config(config: EarlyExitConfig) -> None:
    learned = config.rule in ("classifier", "sequence", "multinomial", "geometric")
    if config.exit_training == "mixed" and learned:
        raise UserError(
            f"mixed training is for the classifiers only, not for rule '{config.rule}', which compares all layers: "
            "train with rule 'never' first, and begin an aligned training with that run (init_from)"
        )
    if config.threshold_decay is not None and config.rule in (*PREDICTIVE_RULES, "never"):
        raise UserError(
            f"rule '{config.rule}' has no threshold, so threshold_decay ({config.threshold_decay}) has no effect: "
            "leave it out"
        )
    for name in ("threshold_decay", "smoothing", "layer_penalty", "exit_weight"):
        value = getattr(config, name)
        if value is not None and not value >= 0:
            raise UserError(f"{name} ({value}) must be 0 or more")
    for name in ("horizon", "mixed_samples"):
        if getattr(config, name) < 1:
            raise UserError(f"{name} ({getattr(config, name)}) must be at least 1")


def _freeze(model: Model, rule: nn.Module) -> None:
    """Freeze all parameters except those of `rule`, and disable dropout, so that the rule sees evaluation outputs."""
    rule_parameters = set(rule.parameters())
    for weight in model.parameters():
        if weight not in rule_parameters:
            weight.requires_grad = False
    for module in model.modules():
        if isinstance(module, Dropout):
            # not evaluation mode, in which the rule itself would not be trained
            module.p = 0.0


DATA_KEYWORDS = ("vocab", "source_vocab", "max_length")
"""Keywords that may be set from the data; a recipe that wraps another one has them itself."""


def _build_spec(base: ModelSpec, recipe: str, config: EarlyExitConfig) -> ModelSpec:
    """The spec of the early-exit recipe, which holds the recipe and keywords of the base model."""
    data_keywords = {name: value for name, value in base.keywords.items() if name in DATA_KEYWORDS}
    base_keywords = {name: value for name, value in base.keywords.items() if name not in DATA_KEYWORDS}
    config_keywords = {field.name: getattr(config, field.name) for field in fields(config)}
    base_part = {"base_recipe": base.recipe, "base_keywords": base_keywords}
    return ModelSpec(recipe, {**data_keywords, **base_part, **config_keywords}, base.module)
