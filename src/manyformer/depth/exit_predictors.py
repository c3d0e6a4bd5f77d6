"""Learned exit rules: small classifiers that predict the layer after which a token exits."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import final

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from manyformer.core import PADDING_SEGMENT, Context, MemorySequence
from manyformer.depth.exit_rules import ExitDecision, ExitRule, ExitRuleInput, ThresholdExitRule, at_least_float32


class LearnedExitRule(ABC):
    """A rule that is trained on target exit layers."""

    per_sequence: bool = False
    """Whether all tokens of a document exit after the same layer."""

    @abstractmethod
    def cost(
        self, streams: Sequence[Float[Tensor, "b l d"]], ctx: Context, target_layers: Int[Tensor, "b l"]
    ) -> Float[Tensor, "b l"]:
        """The cross entropy of the target exit layers, given the outputs of all layers."""


@final
class SequenceExitRule(ExitRule, LearnedExitRule):
    """Predicts one exit layer per target from the mean of the encoder's output (Elbayad et al. 2020, equation 8)."""

    per_sequence = True

    def __init__(self, dim: int, depth: int) -> None:
        super().__init__()
        self.choose = nn.Linear(dim, depth)

    def init_plan(self, ctx: Context, x: Float[Tensor, "b l d"]) -> Int[Tensor, "b l"]:
        layer: Tensor = self.choose(mean_of_source(ctx)).argmax(-1) + 1
        return layer

    def forward(self, inputs: ExitRuleInput, plan: Int[Tensor, "b l"] | None) -> ExitDecision:
        assert plan is not None
        return ExitDecision(plan <= inputs.number, plan)

    def cost(
        self, streams: Sequence[Float[Tensor, "b l d"]], ctx: Context, target_layers: Int[Tensor, "b l"]
    ) -> Float[Tensor, "b l"]:
        logits = at_least_float32(self.choose(mean_of_source(ctx)))
        return F.cross_entropy(logits.movedim(-1, 1), target_layers - 1, reduction="none")


def mean_of_source(ctx: Context) -> Float[Tensor, "b l d"]:
    """For each target token the mean of the encoder's output over the token's document, without padding."""
    memory = ctx.memory
    if memory is None:
        raise ValueError("predicting one exit layer for the entire target needs the output of an encoder")
    return _document_means(memory, ctx.positions.segment_ids)


def _document_means(memory: MemorySequence, segment_ids: Int[Tensor, "b l"]) -> Float[Tensor, "b l d"]:
    rows = memory.y.shape[0]
    same_document = (segment_ids.expand(rows, -1)[:, :, None] == memory.positions.segment_ids[:, None, :]) & (
        memory.positions.segment_ids != PADDING_SEGMENT
    )[:, None]
    weights = same_document.to(memory.y.dtype)
    return weights @ memory.y / weights.sum(-1, keepdim=True).clamp(min=1)


@final
class MultinomialExitRule(ExitRule, LearnedExitRule):
    """Predicts an exit layer per token from the output of the first one (Elbayad et al. 2020, eq. 9, "multinomial")."""

    def __init__(self, dim: int, depth: int) -> None:
        super().__init__()
        self.choose = nn.Linear(dim, depth)

    def forward(self, inputs: ExitRuleInput, plan: Int[Tensor, "b l"] | None) -> ExitDecision:
        if inputs.number == 1:
            plan = self.choose(inputs.classifier_input).argmax(-1) + 1
        assert plan is not None
        return ExitDecision(plan <= inputs.number, plan)

    def cost(
        self, streams: Sequence[Float[Tensor, "b l d"]], ctx: Context, target_layers: Int[Tensor, "b l"]
    ) -> Float[Tensor, "b l"]:
        logits = at_least_float32(self.choose(streams[0]))
        return F.cross_entropy(logits.movedim(-1, 1), target_layers - 1, reduction="none")


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

    def logits(self, streams: Sequence[Float[Tensor, "b l d"]]) -> Float[Tensor, "b l n"]:
        """The logit of exiting after each layer but the last, given that the token has reached it."""
        return at_least_float32(torch.cat([self.leave(stream) for stream in streams[:-1]], dim=-1))

    def log_exit_probabilities(self, streams: Sequence[Float[Tensor, "b l d"]]) -> Float[Tensor, "b l m"]:
        """The log-probability of exiting after each layer; a token that reaches the last layer exits there."""
        logits = self.logits(streams)
        log_survival = F.pad(F.logsigmoid(-logits).cumsum(-1), (1, 0))
        return log_survival + F.pad(F.logsigmoid(logits), (0, 1))

    def cost(
        self, streams: Sequence[Float[Tensor, "b l d"]], ctx: Context, target_layers: Int[Tensor, "b l"]
    ) -> Float[Tensor, "b l"]:
        return -self.log_exit_probabilities(streams).gather(-1, target_layers[..., None] - 1).squeeze(-1)
