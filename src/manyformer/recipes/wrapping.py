"""Any model whose stack shows its layers, made one that tokens may leave early."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple, overload

from torch import nn

from manyformer.core import Chain, Layer
from manyformer.depth.leaving import EarlyExit
from manyformer.depth.predictors import Geometric, Learned, PerSequence, PerToken
from manyformer.depth.rules import Likeliest, Margin, Never, Rule, Saturation
from manyformer.dropout import Dropout
from manyformer.errors import UserError
from manyformer.models import EncoderDecoder, LanguageModel, Model, Output, Spec
from manyformer.models.exit_loss import Agree, Exam, ExitLoss, Foretell, LayerWeights
from manyformer.models.exits import Exits
from manyformer.models.oracles import Correctness, Likelihood

RuleName = Literal["never", "softmax", "saturation", "classifier", "likeliest", "sequence", "multinomial", "geometric"]
Thresholds = float | tuple[float, ...] | None
Classifiers = Literal["shared", "own"]
Training = Literal["aligned", "mixed"]
OracleName = Literal["likelihood", "correctness"]

ORACLES = {"likelihood": Likelihood(), "correctness": Correctness()}

USUAL = {"geometric": 0.5}
"""Thresholds that papers give; otherwise `CONFIDENT`."""

CONFIDENT = 0.9

FORETOLD = ("sequence", "multinomial")
"""Rules that take the likeliest layer, and know no threshold."""


@dataclass(frozen=True, kw_only=True)
class Leaving:
    """When tokens leave, and how that is learned; see `early_exit` for what the words mean."""

    rule: RuleName = "softmax"
    threshold: Thresholds = None
    fade: float | None = None
    horizon: int = 100
    classifiers: Classifiers = "shared"
    layer_weights: LayerWeights = "rising"
    training: Training = "aligned"
    draws: int = 1
    oracle: OracleName = "correctness"
    smoothing: float = 1.0
    penalty: float = 0.01
    exit_weight: float = 0.1

    def values(self, depth: int) -> tuple[float, ...]:
        """The thresholds of all layers but the last. Raises UserError where they are not so many."""
        if self.rule in (*FORETOLD, "never"):
            if self.threshold is not None:
                raise UserError(f"rule '{self.rule}' knows no threshold ({self.threshold}): leave it out")
            return ()
        given = USUAL.get(self.rule, CONFIDENT) if self.threshold is None else self.threshold
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
) -> Model:
    """`model`, whose tokens may now leave its stack (of an encoder-decoder: the decoder's) after any layer.

    It has the very parts of `model`, trained or not, and can be trained, saved and checked as any other. `rule` says
    who leaves: measures of confidence with a `threshold` (0.9; above 1 nobody leaves, a tuple has one for each layer
    but the last) are "softmax" (the difference of the two largest probabilities), "saturation" (how parallel the stream
    stays), "likeliest" (the largest probability) and "classifier" (a unit trained last, with all else frozen);
    "geometric" (threshold 0.5), "multinomial" and "sequence" are trained with the model to foretell the layer; "never"
    lets nobody leave. A threshold with `fade` (4 in the paper) falls along the `horizon` (the longest output).

    All layers have the model's classifier, or, with "own", each a copy of it to begin with. They learn in "aligned"
    training from every layer, by `weights` alike or rising with their numbers, in "mixed" training from `draws` passes
    that tokens leave at random. Rules that foretell learn from an `oracle`: the layer at which what was right is
    likeliest, or is chosen, less `penalty` a layer, its scores smoothed over neighbours; `exit_weight` weighs that.
    Raises UserError where the stack shows no layers, and for words that contradict each other.
    """
    leaving = Leaving(
        rule=rule, threshold=threshold, fade=fade, horizon=horizon, classifiers=classifiers,
        layer_weights=layer_weights, training=training, draws=draws, oracle=oracle, smoothing=smoothing,
        penalty=penalty, exit_weight=exit_weight,
    )  # fmt: skip
    wrapped = wrap(model, leaving)
    spec: Spec | None = getattr(model, "spec", None)
    if spec is not None:
        wrapped.spec = _spec(
            spec, "early-exit-lm" if isinstance(model, LanguageModel) else "early-exit-seq2seq", leaving
        )
    return wrapped


@overload
def wrap(model: LanguageModel, leaving: Leaving) -> LanguageModel: ...
@overload
def wrap(model: EncoderDecoder, leaving: Leaving) -> EncoderDecoder: ...
@overload
def wrap(model: Model, leaving: Leaving) -> Model: ...
def wrap(model: Model, leaving: Leaving) -> Model:
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


class Parts(NamedTuple):
    """What a wrapped model has instead of its stack and its head, and what it learns besides."""

    layers: EarlyExit
    head: Exits
    loss: ExitLoss


def _parts(model: LanguageModel | EncoderDecoder, body: Layer, head: Output, leaving: Leaving) -> Parts:
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
    own = [copy.deepcopy(head) for _ in range(depth - 1)] if leaving.classifiers == "own" else []
    exits = Exits(head, own)
    rule = _rule(leaving, model, exits, depth)
    draws = leaving.draws if leaving.training == "mixed" else None
    layers = EarlyExit(body, rule, draws=draws)
    # in its own stage nothing but the classifier of confidence learns
    weights = None if leaving.rule == "classifier" else "even" if draws else leaving.layer_weights
    return Parts(layers, exits, ExitLoss(depth, weights, _exam(leaving, rule)))


def _rule(leaving: Leaving, model: LanguageModel | EncoderDecoder, exits: Exits, depth: int) -> Rule:
    values = leaving.values(depth)
    dim = _width(model)
    fading: dict[str, Any] = {"decay": leaving.fade, "horizon": leaving.horizon}
    match leaving.rule:
        case "never":
            return Never()
        case "softmax":
            return Margin(exits, values, **fading)
        case "likeliest":
            return Likeliest(exits, values, **fading)
        case "saturation":
            return Saturation(values, **fading)
        case "classifier" | "geometric":
            return Geometric(dim, values, **fading)
        case "multinomial":
            return PerToken(dim, depth)
        case "sequence":
            if not isinstance(model, EncoderDecoder):
                raise UserError(
                    "rule 'sequence' looks at the whole source, and a language model has none: take another"
                )
            return PerSequence(dim, depth)


def _exam(leaving: Leaving, rule: Rule) -> Exam | None:
    if leaving.rule == "classifier":
        assert isinstance(rule, Geometric)
        return Agree(rule)
    if not isinstance(rule, Learned):
        return None
    return Foretell(
        rule,
        ORACLES[leaving.oracle],
        smoothing=leaving.smoothing,
        penalty=leaving.penalty,
        weight=leaving.exit_weight,
    )


def _check(leaving: Leaving) -> None:
    learned = leaving.rule in ("classifier", "sequence", "multinomial", "geometric")
    if leaving.training == "mixed" and learned:
        raise UserError(
            f"mixed training is for the classifiers alone, not for rule '{leaving.rule}', which compares all layers: "
            "train with rule 'never' first, and begin an aligned training with that run (start)"
        )
    if leaving.fade is not None and leaving.rule in (*FORETOLD, "never"):
        raise UserError(f"rule '{leaving.rule}' knows no threshold that could fade ({leaving.fade}): leave it out")
    for name in ("fade", "smoothing", "penalty", "exit_weight"):
        value = getattr(leaving, name)
        if value is not None and not value >= 0:
            raise UserError(f"{name} ({value}) must be 0 or more")
    for name in ("horizon", "draws"):
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


OUTSIDE = ("vocab", "source_vocab", "longest")
"""Keywords that data may decide; a recipe that wraps another has them itself."""


def _spec(inner: Spec, recipe: str, leaving: Leaving) -> Spec:
    """The recipe that wraps, with the keywords of what is wrapped inside."""
    outside = {name: value for name, value in inner.keywords.items() if name in OUTSIDE}
    inside = {name: value for name, value in inner.keywords.items() if name not in OUTSIDE}
    words = {field.name: getattr(leaving, field.name) for field in fields(leaving)}
    return Spec(recipe, {**outside, "of": inner.recipe, "inner": inside, **words})
