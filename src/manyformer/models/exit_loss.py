"""What a model learns that tokens may leave early: classifiers of all layers, and when to leave."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal, final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from manyformer.depth.early_exit_stack import drop_exit_layer
from manyformer.depth.exit_predictors import GeometricExitRule, LearnedExitRule
from manyformer.models.auxiliary_losses import AuxiliaryLoss, LossInputs, divide_by_targets, mean_loss
from manyformer.models.exit_oracles import (
    ExitOracle,
    agreement,
    best_layers,
    binary_cost,
    counted_in,
    layer_scores,
    mean_where,
    smoothing_kernel,
)
from manyformer.training_hooks import RequiresPretrained

ExitLossWeights = Literal["even", "rising"]

LayerStreams = Sequence[Float[Tensor, "b l m"]]


class ExitRuleLoss(nn.Module, ABC):
    """What teaches a rule."""

    @abstractmethod
    def forward(self, streams: LayerStreams, lesson: LossInputs) -> Float[Tensor, ""]:
        """Its loss, given what comes out of all layers."""


@final
class OraclePredictionLoss(ExitRuleLoss):
    """Leave where an oracle would have: cross entropy with its choice, gradients of which reach the whole model.

    Elbayad et al. 2020, section 3.2; `weight` is their alpha. A rule for whole sequences learns from the sums over all
    of a sequence, each of which counts once, however long.
    """

    def __init__(
        self, rule: LearnedExitRule, oracle: ExitOracle, *, smoothing: float, penalty: float, weight: float
    ) -> None:
        super().__init__()
        # a part of the stack, not of the loss
        self._rule = (rule,)
        self.oracle, self.penalty, self.weight = oracle, penalty, weight
        self.smoothing = math.inf if rule.per_sequence else smoothing

    def forward(self, streams: LayerStreams, lesson: LossInputs) -> Float[Tensor, ""]:
        (rule,), place, counted = self._rule, lesson.ctx.positions, counted_in(lesson.targets)
        scores = layer_scores(self.oracle, streams, lesson.head, lesson.targets)
        wanted = best_layers(scores, place, counted, smoothing=self.smoothing, penalty=self.penalty)
        cost = rule.cost(drop_exit_layer(streams), lesson.ctx, wanted)
        if not rule.per_sequence:
            return self.weight * mean_where(cost, counted)
        share = 1 / (smoothing_kernel(place, scores, math.inf) * counted[:, None]).sum(-1).clamp(min=1)
        return self.weight * (cost * share * counted).sum() / (share * counted).sum().clamp(min=1)


@final
class AgreementLoss(ExitRuleLoss, RequiresPretrained):
    """Leave where the likeliest class is the last layer's: cross entropy, the mean over layers but the last.

    Schuster et al. 2022, section 3.4, equation 9, whose released code also balances yes and no in each layer.
    """

    requirement = "confidence by a classifier is learned from what the layers of a trained model say, all of it frozen"

    def __init__(self, rule: GeometricExitRule) -> None:
        super().__init__()
        self._rule = (rule,)

    def forward(self, streams: LayerStreams, lesson: LossInputs) -> Float[Tensor, ""]:
        (rule,) = self._rule
        cost = binary_cost(rule.logits(drop_exit_layer(streams)), agreement(streams, lesson.head))
        return mean_where(cost, counted_in(lesson.targets))


@final
class ExitLoss(AuxiliaryLoss):
    """Turns the model's own loss into that of all exits, and adds what an `exam` asks of the rule.

    "even" weighs all layers alike (Elbayad et al. 2020, aligned training), "rising" by their numbers (Schuster et al.
    2022, section 3.2); the weights sum to one. In mixed training the streams are random passes, all alike. None leaves
    the loss of the last layer as it is. `depth` is the number of layers.
    """

    def __init__(self, depth: int, weights: ExitLossWeights | None, exam: ExitRuleLoss | None = None) -> None:
        super().__init__()
        self.depth, self.weights, self.exam = depth, weights, exam

    def forward(self, streams: LayerStreams, lesson: LossInputs) -> Tensor:
        # without training one more comes behind those of all layers: the one whose loss is the model's own
        exits = streams[: self.depth] if len(streams) > self.depth else streams
        extra = torch.zeros_like(lesson.loss.total)
        if self.weights is not None:
            own = divide_by_targets(lesson.loss)
            sizes = [1.0 if self.weights == "even" else float(number) for number in range(1, len(exits) + 1)]
            extra = extra - own
            for size, stream in zip(sizes, exits):
                same = stream is streams[-1]
                loss = own if same else mean_loss(lesson.head, stream, lesson.targets, lesson.smoothing)
                extra = extra + size / sum(sizes) * loss
        return extra if self.exam is None else extra + self.exam(exits, lesson)
