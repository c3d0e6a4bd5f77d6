"""Learned exit rules: small classifiers that predict the layer after which a token exits."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import final

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from manyformer.core import PADDING_SEGMENT, Context
from manyformer.depth.exit_rules import (
    ExitDecision,
    ExitRuleInput,
    PlannedExitRule,
    ThresholdExitRule,
    at_least_float32,
)

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
