"""Auxiliary losses at intermediate layers, which help deep language models to train."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple, final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from manyformer.models.head import BatchLoss, ClassHead, OutputHead
from manyformer.nn.batches import IGNORE_INDEX
from manyformer.nn.core import Context
from manyformer.nn.runtime.torch_internals import compiler_disabled
from manyformer.nn.runtime.training_hooks import TracksProgress


class LossInputs(NamedTuple):
    """The inputs of an auxiliary loss: the embedded tokens, targets, context, and the model's `head` and its `loss`."""

    embedded: Float[Tensor, "b l d"]
    targets: Int[Tensor, "b l"]
    ctx: Context
    head: OutputHead
    loss: BatchLoss
    label_smoothing: float


class AuxiliaryLoss(nn.Module, ABC):
    """A loss computed from the outputs of all layers and added to the model's own loss."""

    @abstractmethod
    def forward(self, streams: Sequence[Float[Tensor, "b l d"]], inputs: LossInputs) -> Tensor:
        """The sum of the losses, each a mean over its targets; `streams` are the outputs of the layers in order."""


def mean_loss(
    head: OutputHead, x: Float[Tensor, "b l d"], targets: Int[Tensor, "b l"], label_smoothing: float
) -> Tensor:
    """The mean loss of a target that counts."""
    return divide_by_targets(head.loss(x, targets, label_smoothing=label_smoothing))


def divide_by_targets(loss: BatchLoss) -> Tensor:
    """The total of `loss` divided by the number of its targets."""
    return loss.total / loss.targets.clamp(min=1)


@final
class LayerwiseNextTokenLoss(AuxiliaryLoss, TracksProgress):
    """Al-Rfou et al. 2019 (arXiv:1808.04444), "auxiliary losses": every layer predicts, and two tokens ahead as well.

    Layer l of n predicts the next token with a separate classifier until l / 2n of the training is done, so that after
    half of it only the last layer is left. Wherever the next token is predicted, another classifier predicts the
    second next one, at half the weight; that of the last layer remains active to the end. None of these classifiers is
    needed after training. The loss at every position of a row, also an auxiliary one in the paper, is standard in
    language models here. `norm` precedes the classifiers of intermediate layers, for pre-norm stacks.
    """

    AHEAD_WEIGHT = 0.5

    def __init__(self, dim: int, vocab: int, depth: int, *, norm: Callable[[], nn.Module] | None = None) -> None:
        super().__init__()
        self.depth = depth

        def head(number: int) -> ClassHead:
            return ClassHead(dim, vocab, transform=None if norm is None or number == depth - 1 else norm())

        self.next = nn.ModuleList(head(number) for number in range(depth - 1))
        self.ahead = nn.ModuleList(head(number) for number in range(depth))
        self.progress = 0.0

    def set_progress(self, fraction: float) -> None:
        self.progress = fraction

    # outside compiled code, which would be recompiled whenever a layer becomes inactive
    @compiler_disabled
    def forward(self, streams: Sequence[Float[Tensor, "b l d"]], inputs: LossInputs) -> Tensor:
        second_targets = targets_two_ahead(inputs.targets, inputs.ctx.positions.segment_ids)

        def loss(head: nn.Module, x: Tensor, targets: Tensor) -> Tensor:
            assert isinstance(head, ClassHead)
            return mean_loss(head, x, targets, inputs.label_smoothing)

        # the final norm is part of the last layer here
        total = self.AHEAD_WEIGHT * loss(self.ahead[-1], streams[-1], second_targets)
        active = self.active_layers()
        for index in range(self.depth - 1):
            heads = (self.next[index], self.ahead[index])
            x = streams[index]
            if index in active:
                total = total + loss(heads[0], x, inputs.targets)
                total = total + self.AHEAD_WEIGHT * loss(heads[1], x, second_targets)
            else:
                # with distributed training every parameter must receive a gradient
                total = total + 0.0 * sum(weight.sum() for head in heads for weight in head.parameters())
        return total

    def active_layers(self) -> list[int]:
        """The layers below the last whose losses count at this point of the training, counted from 0."""
        return [index for index in range(self.depth - 1) if self.progress < (index + 1) / (2 * self.depth)]


def targets_two_ahead(targets: Int[Tensor, "b l"], segments: Int[Tensor, "b l"]) -> Int[Tensor, "b l"]:
    """The second next tokens as targets: the targets shifted by one, where the next token is of the same document."""
    shifted = torch.full_like(targets, IGNORE_INDEX)
    # the target of token i + 1 is token i + 2
    shifted[:, :-1] = targets[:, 1:]
    shifted[:, :-1].masked_fill_(segments[:, 1:] != segments[:, :-1], IGNORE_INDEX)
    return shifted
