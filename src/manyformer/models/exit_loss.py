"""Training losses for early exit: of the classifiers of all layers, and of learned exit rules."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal, final

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from manyformer.batches import IGNORE_INDEX
from manyformer.depth.early_exit_stack import drop_exit_layer
from manyformer.depth.exit_rules import GeometricExitRule, LearnedExitRule
from manyformer.models.auxiliary_losses import AuxiliaryLoss, LossInputs, divide_by_targets
from manyformer.models.exit_classifiers import exit_loss
from manyformer.models.exit_oracles import (
    ExitOracle,
    agreement,
    best_layers,
    layer_scores,
    mean_where,
    smoothing_kernel,
)
from manyformer.training_hooks import RequiresPretrained

ExitLossWeights = Literal["even", "rising"]

ExitStreams = Sequence[Float[Tensor, "b l m"]]
"""The outputs of all layers in order, whose last channel is the number of the layer."""


class ExitRuleLoss(nn.Module, ABC):
    """The training loss of an exit rule."""

    @abstractmethod
    def forward(self, streams: ExitStreams, inputs: LossInputs) -> Float[Tensor, ""]:
        """The rule's loss, given the outputs of all layers."""


@final
class OraclePredictionLoss(ExitRuleLoss):
    """Cross entropy between the rule's exit layer and that of an oracle; gradients reach all weights of the model.

    Elbayad et al. 2020, section 3.2; `weight` is their alpha. A per-sequence rule learns from the scores summed over a
    sequence, and each sequence counts once, whatever its length.
    """

    def __init__(
        self, rule: LearnedExitRule, oracle: ExitOracle, *, smoothing: float, layer_penalty: float, weight: float
    ) -> None:
        super().__init__()
        # in a tuple, so that the rule is registered as a child of the stack only
        self._rule = (rule,)
        self.oracle = oracle
        self.layer_penalty = layer_penalty
        self.weight = weight
        self.smoothing = math.inf if rule.per_sequence else smoothing

    def forward(self, streams: ExitStreams, inputs: LossInputs) -> Float[Tensor, ""]:
        (rule,) = self._rule
        positions = inputs.ctx.positions
        scored = inputs.targets != IGNORE_INDEX
        scores = layer_scores(self.oracle, streams, inputs.head, inputs.targets)
        target_layers = best_layers(
            scores, positions, scored, smoothing=self.smoothing, layer_penalty=self.layer_penalty
        )
        cost = rule.cost(drop_exit_layer(streams), inputs.ctx, target_layers)
        if not rule.per_sequence:
            return self.weight * mean_where(cost, scored)
        token_weight = 1 / (smoothing_kernel(positions, scores, math.inf) * scored[:, None]).sum(-1).clamp(min=1)
        return self.weight * (cost * token_weight * scored).sum() / (token_weight * scored).sum().clamp(min=1)


@final
class AgreementLoss(ExitRuleLoss, RequiresPretrained):
    """Binary cross entropy: exit where the layer predicts the class of the last layer; the mean over all other layers.

    Schuster et al. 2022, section 3.4, equation 9, whose released code also balances the two labels in each layer.
    """

    requirement = "the confidence classifier is trained on the layers' predictions of a trained, frozen model"

    def __init__(self, rule: GeometricExitRule) -> None:
        super().__init__()
        self._rule = (rule,)

    def forward(self, streams: ExitStreams, inputs: LossInputs) -> Float[Tensor, ""]:
        (rule,) = self._rule
        logits = rule.logits(drop_exit_layer(streams))
        labels = agreement(streams, inputs.head)
        cost = F.binary_cross_entropy_with_logits(logits, labels, reduction="none").mean(-1)
        return mean_where(cost, inputs.targets != IGNORE_INDEX)


@final
class ExitLoss(AuxiliaryLoss):
    """Replaces the loss of the last layer by a weighted mean over all exits, and adds the `rule_loss` of the exit rule.

    "even" gives all layers equal weights (Elbayad et al. 2020, aligned training), "rising" weights proportional to
    their numbers (Schuster et al. 2022, section 3.2); the weights sum to one. In mixed training the streams are random
    passes of equal weight. None leaves the loss of the last layer as it is. `depth` is the number of layers.
    """

    def __init__(self, depth: int, weights: ExitLossWeights | None, rule_loss: ExitRuleLoss | None = None) -> None:
        super().__init__()
        self.depth = depth
        self.weights = weights
        self.rule_loss = rule_loss

    def forward(self, streams: ExitStreams, inputs: LossInputs) -> Tensor:
        # in evaluation mode the streams of all layers are followed by that of the model's own output
        if len(streams) > self.depth:
            exits = streams[: self.depth]
        else:
            exits = streams
        extra = torch.zeros_like(inputs.loss.total)
        if self.weights is not None:
            final_loss = divide_by_targets(inputs.loss)
            layer_weights = [1.0 if self.weights == "even" else float(number) for number in range(1, len(exits) + 1)]
            extra = extra - final_loss
            for number, (layer_weight, stream) in enumerate(zip(layer_weights, exits), 1):
                loss = final_loss
                if stream is not streams[-1]:
                    smoothing = inputs.label_smoothing
                    loss = divide_by_targets(
                        exit_loss(inputs.head, stream, number, inputs.targets, label_smoothing=smoothing)
                    )
                extra = extra + layer_weight / sum(layer_weights) * loss
        return extra if self.rule_loss is None else extra + self.rule_loss(exits, inputs)
