"""Exit rules, which decide the tokens that exit after a layer: the interface, confidence thresholds, learned rules."""

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple, Protocol, final, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from manyformer.base.errors import UserError
from manyformer.nn.core import PADDING_SEGMENT, Context
from manyformer.nn.runtime.training_hooks import OptionalOnLoad

CONSTANT_SHARE = 0.9
"""The fraction of a decaying threshold that stays constant (Schuster et al. 2022, equation 5)."""


class ExitRuleInput(NamedTuple):
    """The input of an exit rule after layer `number`, from 1: the layer's output and input, and that of classifiers."""

    number: int
    hidden: Float[Tensor, "b l d"]
    previous_hidden: Float[Tensor, "b l d"]
    classifier_input: Float[Tensor, "b l d"]
    position_ids: Int[Tensor, "b l"]


class ExitDecision(NamedTuple):
    """The tokens that exit, the planned exit layers for later calls, and the logits if the rule computed them."""

    exits: Bool[Tensor, "b l"]
    plan: Int[Tensor, "b l"] | None = None
    logits: Float[Tensor, "b l v"] | None = None


class ExitRule(nn.Module, OptionalOnLoad, ABC):
    """Decides after each layer but the last which tokens exit, from no later tokens than the token itself."""

    def init_plan(self, ctx: Context, x: Float[Tensor, "b l d"]) -> Int[Tensor, "b l"] | None:
        """The exit layers planned before the first layer, one per token; None for rules without a plan."""
        return None

    def applies_after(self, number: int) -> bool:
        """Whether tokens may exit after layer `number`; if not, the rule need not be evaluated."""
        return True

    def at_thresholds(self, values: tuple[float, ...]) -> "ExitRule":
        """A copy with other thresholds, one for each layer but the last, and the same weights.

        Raises UserError for a rule without thresholds."""
        raise UserError(f"a {type(self).__name__} has no threshold: it exits at the layer that it predicts")

    @abstractmethod
    def forward(self, inputs: ExitRuleInput, plan: Int[Tensor, "b l"] | None) -> ExitDecision: ...


@final
class NeverExit(ExitRule):
    """No token exits before the last layer."""

    def applies_after(self, number: int) -> bool:
        return False

    def forward(self, inputs: ExitRuleInput, plan: Int[Tensor, "b l"] | None) -> ExitDecision:
        return ExitDecision(torch.zeros_like(inputs.position_ids, dtype=torch.bool))


class PlannedExitRule(ExitRule):
    """Tokens exit after the layer that is planned for them."""

    def forward(self, inputs: ExitRuleInput, plan: Int[Tensor, "b l"] | None) -> ExitDecision:
        assert plan is not None
        return ExitDecision(plan <= inputs.number, plan)


@final
class RandomExit(PlannedExitRule):
    """Every token exits after a random one of `depth` layers: the exit sequences of mixed training."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.depth = depth

    def init_plan(self, ctx: Context, x: Float[Tensor, "b l d"]) -> Int[Tensor, "b l"]:
        return torch.randint(1, self.depth + 1, x.shape[:2], device=x.device)


class ThresholdExitRule(ExitRule):
    """Tokens exit if their confidence, from 0 to 1, reaches a threshold: `values` has one for each layer but the last.

    Above 1 no token exits. With `decay` the threshold of the token at position t of its document is
    0.9 value + 0.1 exp(-decay t / horizon), clamped to [0, 1] (Schuster et al. 2022, equation 5).
    """

    def __init__(self, values: Sequence[float], *, decay: float | None = None, horizon: int = 1) -> None:
        super().__init__()
        self.values = tuple(values)
        self.decay = decay
        self.horizon = horizon

    @abstractmethod
    def confidence(self, inputs: ExitRuleInput) -> tuple[Float[Tensor, "b l"], Float[Tensor, "b l v"] | None]:
        """The confidence of each token's prediction, and the logits if they were computed."""

    def at_thresholds(self, values: tuple[float, ...]) -> "ThresholdExitRule":
        # a shallow copy, which shares parameters and classifiers with this rule
        rule = copy.copy(self)
        rule.values = values
        return rule

    def applies_after(self, number: int) -> bool:
        return self.values[number - 1] <= 1

    def forward(self, inputs: ExitRuleInput, plan: Int[Tensor, "b l"] | None) -> ExitDecision:
        if not self.applies_after(inputs.number):
            return ExitDecision(torch.zeros_like(inputs.position_ids, dtype=torch.bool))
        value = self.values[inputs.number - 1]
        confidence, logits = self.confidence(inputs)
        threshold = value if self.decay is None else self.decayed_threshold(value, inputs.position_ids)
        return ExitDecision(confidence >= threshold, None, logits)

    def decayed_threshold(self, value: float, position_ids: Int[Tensor, "b l"]) -> Float[Tensor, "b l"]:
        """The threshold `value` decayed for tokens at these positions."""
        assert self.decay is not None
        decay = torch.exp(position_ids * (-self.decay / self.horizon))
        return (CONSTANT_SHARE * value + (1 - CONSTANT_SHARE) * decay).clamp(0, 1)

    def extra_repr(self) -> str:
        return ", ".join(f"{value:g}" for value in self.values)


@runtime_checkable
class LayerClassifiers(Protocol):
    """The interface of classifiers that predict tokens after any layer."""

    def logits_at(self, classifier_input: Float[Tensor, "b l d"], layer: int) -> Float[Tensor, "b l v"]:
        """The logits for the output of layer number `layer`."""


class ClassifierExitRule(ThresholdExitRule):
    """Confidence from the distribution over classes, for which every layer's output is projected to the vocabulary."""

    def __init__(
        self, classifiers: LayerClassifiers, values: Sequence[float], *, decay: float | None = None, horizon: int = 1
    ) -> None:
        super().__init__(values, decay=decay, horizon=horizon)
        # in a tuple, so that they are registered as children of the model's head only
        self._classifiers = (classifiers,)

    @abstractmethod
    def confidence_of(self, top_two: Float[Tensor, "b l 2"]) -> Float[Tensor, "b l"]:
        """The confidence from the probabilities of the two most probable classes."""

    def confidence(self, inputs: ExitRuleInput) -> tuple[Float[Tensor, "b l"], Float[Tensor, "b l v"] | None]:
        logits = self._classifiers[0].logits_at(inputs.classifier_input, inputs.number)
        wide = at_least_float32(logits)
        # two probabilities, without the softmax of the entire vocabulary
        top_two = (wide.topk(2).values - wide.logsumexp(-1, keepdim=True)).exp()
        return self.confidence_of(top_two), logits


@final
class MarginExitRule(ClassifierExitRule):
    """The difference of the two largest probabilities: "softmax response" (Schuster et al. 2022, section 3.4)."""

    def confidence_of(self, top_two: Float[Tensor, "b l 2"]) -> Float[Tensor, "b l"]:
        return top_two[..., 0] - top_two[..., 1]


@final
class MaxProbabilityExitRule(ClassifierExitRule):
    """The largest probability: "confidence thresholding" (Elbayad et al. 2020, section 4.3)."""

    def confidence_of(self, top_two: Float[Tensor, "b l 2"]) -> Float[Tensor, "b l"]:
        return top_two[..., 0]


@final
class SaturationExitRule(ThresholdExitRule):
    """The cosine similarity of a layer's input and output stream; no exit after the first layer.

    "Hidden-state saturation" (Schuster et al. 2022, section 3.4). A negative cosine counts as confidence 0.
    """

    def confidence(self, inputs: ExitRuleInput) -> tuple[Float[Tensor, "b l"], None]:
        if inputs.number == 1:
            # below every threshold: the input of the first layer is an embedding, which says nothing about saturation
            return torch.full_like(inputs.position_ids, -math.inf, dtype=torch.float32), None
        hidden = at_least_float32(inputs.hidden)
        previous_hidden = at_least_float32(inputs.previous_hidden)
        return F.cosine_similarity(hidden, previous_hidden, dim=-1).clamp(min=0), None


def at_least_float32(x: Float[Tensor, "*n"]) -> Float[Tensor, "*n"]:
    """`x` in float32 or wider: in half precision too many confidences would be equal."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def append_exit_layer(x: Float[Tensor, "b l d"], number: int) -> Float[Tensor, "b l m"]:
    """The stream with one more channel: the number of the layer after which all its tokens exit."""
    return torch.cat([x, torch.full_like(x[..., :1], number)], dim=-1)


def split_exit_layer(y: Float[Tensor, "*b m"]) -> tuple[Float[Tensor, "*b d"], Int[Tensor, "*b"]]:
    """The hidden state with which each token exited, and the number of its exit layer."""
    return y[..., :-1], y[..., -1].long()


def drop_exit_layer(streams: Sequence[Float[Tensor, "b l m"]]) -> list[Float[Tensor, "b l d"]]:
    """The streams without the channel of the exit layer."""
    return [stream[..., :-1] for stream in streams]


LayerStreams = Sequence[Float[Tensor, "b l d"]]
"""The outputs of all layers in order."""


class LearnedExitRule(ABC):
    """A rule that is trained on target exit layers."""

    per_sequence: bool = False
    """Whether all tokens of a document exit after the same layer."""

    @abstractmethod
    def cost(self, streams: LayerStreams, ctx: Context, target_layers: Int[Tensor, "b l"]) -> Float[Tensor, "b l"]:
        """The cross entropy of the target exit layers, given the outputs of all layers."""


class LayerClassExitRule(PlannedExitRule, LearnedExitRule):
    """Predicts the exit layer as one of `depth` classes, from features that do not depend on the layer."""

    def __init__(self, dim: int, depth: int) -> None:
        super().__init__()
        self.choose = nn.Linear(dim, depth)

    @abstractmethod
    def features(self, ctx: Context, first_output: Float[Tensor, "b l d"]) -> Float[Tensor, "b l d"]:
        """The input of the prediction, given the output of the first layer."""

    def predict(self, features: Float[Tensor, "b l d"]) -> Int[Tensor, "b l"]:
        """The most probable exit layer of each token, from 1."""
        layer: Tensor = self.choose(features).argmax(-1) + 1
        return layer

    def cost(self, streams: LayerStreams, ctx: Context, target_layers: Int[Tensor, "b l"]) -> Float[Tensor, "b l"]:
        logits = at_least_float32(self.choose(self.features(ctx, streams[0])))
        return F.cross_entropy(logits.movedim(-1, 1), target_layers - 1, reduction="none")


@final
class SequenceExitRule(LayerClassExitRule):
    """Predicts one exit layer per target from the mean of the encoder's output (Elbayad et al. 2020, equation 8)."""

    per_sequence = True

    def init_plan(self, ctx: Context, x: Float[Tensor, "b l d"]) -> Int[Tensor, "b l"]:
        return self.predict(self.features(ctx, x))

    def features(self, ctx: Context, first_output: Float[Tensor, "b l d"]) -> Float[Tensor, "b l d"]:
        """For each target token the mean of the encoder's output over the token's document, without padding."""
        if ctx.memory is None:
            raise ValueError("predicting one exit layer for the entire target needs the output of an encoder")
        y, positions = ctx.memory
        segment_ids = ctx.positions.segment_ids.expand(ctx.memory.y.shape[0], -1)
        valid = (positions.segment_ids != PADDING_SEGMENT)[:, None]
        weights = ((segment_ids[:, :, None] == positions.segment_ids[:, None, :]) & valid).to(y.dtype)
        return weights @ y / weights.sum(-1, keepdim=True).clamp(min=1)


@final
class MultinomialExitRule(LayerClassExitRule):
    """Predicts an exit layer per token from the output of the first one (Elbayad et al. 2020, eq. 9, "multinomial")."""

    def forward(self, inputs: ExitRuleInput, plan: Int[Tensor, "b l"] | None) -> ExitDecision:
        return super().forward(inputs, self.predict(inputs.classifier_input) if inputs.number == 1 else plan)

    def features(self, ctx: Context, first_output: Float[Tensor, "b l d"]) -> Float[Tensor, "b l d"]:
        return first_output


@final
class GeometricExitRule(ThresholdExitRule, LearnedExitRule):
    """One unit, shared by all layers, predicts the probability that a token exits: sigmoid(w h + b).

    Elbayad et al. (2020, equation 10, "geometric-like"), who exit above the threshold, here also at it; and the "early
    exit classifier" of Schuster et al. (2022, section 3.4), which is trained with another loss.
    """

    def __init__(self, dim: int, values: Sequence[float], *, decay: float | None = None, horizon: int = 1) -> None:
        super().__init__(values, decay=decay, horizon=horizon)
        self.leave = nn.Linear(dim, 1)

    def confidence(self, inputs: ExitRuleInput) -> tuple[Float[Tensor, "b l"], None]:
        return at_least_float32(self.leave(inputs.classifier_input)).squeeze(-1).sigmoid(), None

    def logits(self, streams: LayerStreams) -> Float[Tensor, "b l n"]:
        """The logit of exiting after each layer but the last, given that the token has reached it."""
        return at_least_float32(torch.cat([self.leave(stream) for stream in streams[:-1]], dim=-1))

    def log_exit_probabilities(self, streams: LayerStreams) -> Float[Tensor, "b l m"]:
        """The log-probability of exiting after each layer; a token that reaches the last layer exits there."""
        logits = self.logits(streams)
        log_survival = F.pad(F.logsigmoid(-logits).cumsum(-1), (1, 0))
        return log_survival + F.pad(F.logsigmoid(logits), (0, 1))

    def cost(self, streams: LayerStreams, ctx: Context, target_layers: Int[Tensor, "b l"]) -> Float[Tensor, "b l"]:
        return -self.log_exit_probabilities(streams).gather(-1, target_layers[..., None] - 1).squeeze(-1)
