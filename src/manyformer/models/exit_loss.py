"""Training losses for early exit: of the classifiers of all layers, and of exit rules that learn from oracles.

An oracle computes from the targets after which layer a token should exit.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Literal, final

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from manyformer.models.auxiliary_losses import AuxiliaryLoss, LossInputs, divide_by_targets
from manyformer.models.exit_classifiers import exit_logits, exit_loss
from manyformer.models.head import OutputHead
from manyformer.nn.batches import IGNORE_INDEX
from manyformer.nn.core import TokenPositions
from manyformer.nn.depth.exit_rules import GeometricExitRule, LearnedExitRule, drop_exit_layer
from manyformer.nn.runtime.training_hooks import RequiresPretrained

ExitOracle = Callable[[Float[Tensor, "b l v"], Int[Tensor, "b l"]], Float[Tensor, "b l"]]
"""From the logits of a layer and the targets to the score of each prediction, undefined for ignored targets."""


def target_log_probability(logits: Float[Tensor, "b l v"], targets: Int[Tensor, "b l"]) -> Float[Tensor, "b l"]:
    """The log-probability of the target (Elbayad et al. 2020, equations 9 and 14)."""
    # ignored targets are negative and need a valid index
    target_logits = logits.gather(-1, targets.clamp(min=0)[..., None]).squeeze(-1)
    return target_logits - logits.logsumexp(-1)


def is_most_probable(logits: Float[Tensor, "b l v"], targets: Int[Tensor, "b l"]) -> Float[Tensor, "b l"]:
    """1 where the target is the most probable class, else 0 (Elbayad et al. 2020, equations 10 and 16)."""
    return (logits.argmax(-1) == targets).to(logits.dtype)


ORACLES: dict[str, ExitOracle] = {"likelihood": target_log_probability, "correctness": is_most_probable}


@torch.no_grad()
def layer_scores(
    oracle: ExitOracle, streams: Sequence[Float[Tensor, "b l m"]], head: OutputHead, targets: Int[Tensor, "b l"]
) -> Float[Tensor, "n b l"]:
    """The scores of all layers (n, b, l); the last channel of each stream is the number of its layer."""
    return torch.stack(
        [oracle(exit_logits(head, stream, layer).float(), targets) for layer, stream in enumerate(streams, 1)]
    )


@torch.no_grad()
def best_layers(
    scores: Float[Tensor, "n b l"],
    positions: TokenPositions,
    scored: Bool[Tensor, "b l"],
    *,
    smoothing: float,
    layer_penalty: float,
) -> Int[Tensor, "b l"]:
    """The layer, counted from 1, with the best score minus `layer_penalty` times its number; the lowest of equal ones.

    Scores are first smoothed over the tokens of a document by exp(-|t - t'|^2 / `smoothing`): 0 means no smoothing,
    infinity a sum over the document (Elbayad et al. 2020, equations 14 to 17; in (16) the counts are those of t', not
    of t). Tokens outside `scored` do not contribute.
    """
    weights = smoothing_kernel(positions, scores, smoothing)
    smoothed = torch.einsum("nbs,bls->nbl", scores.masked_fill(~scored, 0.0), weights)
    layers = torch.arange(1, len(scores) + 1, device=scores.device)
    return (smoothed - layer_penalty * layers[:, None, None]).argmax(0) + 1


def smoothing_kernel(
    positions: TokenPositions, like: Float[Tensor, "n b l"], smoothing: float
) -> Float[Tensor, "b l s"]:
    """The weight of the score of each token s in the smoothed score of each token l of the same document."""
    rows = like.shape[1]
    position_ids = positions.position_ids.expand(rows, -1)
    segment_ids = positions.segment_ids.expand(rows, -1)
    same_document = segment_ids[:, :, None] == segment_ids[:, None, :]
    if math.isinf(smoothing):
        return same_document.to(like.dtype)
    squared_distance = (position_ids[:, :, None] - position_ids[:, None, :]).to(like.dtype) ** 2
    if smoothing:
        weights = torch.exp(-squared_distance / smoothing)
    else:
        # each token alone: the limit of the exponential
        weights = (squared_distance == 0).to(like.dtype)
    return torch.where(same_document, weights, 0.0)


@torch.no_grad()
def agreement(streams: Sequence[Float[Tensor, "b l m"]], head: OutputHead) -> Float[Tensor, "b l n"]:
    """For each layer but the last, 1 where it predicts the class of the last layer (Schuster et al. 2022, eq. 9)."""
    # one layer's logits at a time: those of a vocabulary are large
    *predictions, last = (exit_logits(head, stream, layer).argmax(-1) for layer, stream in enumerate(streams, 1))
    return torch.stack([(prediction == last).float() for prediction in predictions], dim=-1)


def mean_where(values: Float[Tensor, "*n"], mask: Bool[Tensor, "*n"]) -> Float[Tensor, ""]:
    """The mean of the values where `mask` is set; 0 for an empty mask."""
    return values.masked_fill(~mask, 0.0).sum() / mask.sum().clamp(min=1)


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
        # one divided by the number of scored tokens of the document, so that all documents count alike
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
            # what the model adds by itself is taken back, since the mean over exits holds it again
            extra = extra - final_loss
            for number, (layer_weight, stream) in enumerate(zip(layer_weights, exits), 1):
                loss = final_loss
                # the loss of the last stream is known already
                if stream is not streams[-1]:
                    smoothing = inputs.label_smoothing
                    loss = divide_by_targets(
                        exit_loss(inputs.head, stream, number, inputs.targets, label_smoothing=smoothing)
                    )
                extra = extra + layer_weight / sum(layer_weights) * loss
        return extra if self.rule_loss is None else extra + self.rule_loss(exits, inputs)
