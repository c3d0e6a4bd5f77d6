"""Losses of a language model besides that of the next token, which help deep ones to train."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple, final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from manyformer.batches import IGNORE_INDEX
from manyformer.core import Context, LayeredStack
from manyformer.models.head import ClassHead
from manyformer.models.model import BatchLoss
from manyformer.models.output_head import OutputHead
from manyformer.training_hooks import TracksProgress


class LossInputs(NamedTuple):
    """What there is to learn: the targets, what the call shares, and the loss that the model's `head` has anyway."""

    targets: Int[Tensor, "b l"]
    ctx: Context
    head: OutputHead
    loss: BatchLoss
    smoothing: float


class AuxiliaryLoss(nn.Module, ABC):
    """More to be learnt from what comes out of each layer."""

    @abstractmethod
    def forward(self, streams: Sequence[Float[Tensor, "b l d"]], lesson: LossInputs) -> Tensor:
        """The sum of the losses, each a mean over its targets; `streams` are what comes out of the layers in turn."""


def mean_loss(head: OutputHead, x: Float[Tensor, "b l d"], targets: Int[Tensor, "b l"], smoothing: float) -> Tensor:
    """The loss of a target, on average."""
    return divide_by_targets(head.loss(x, targets, smoothing=smoothing))


def divide_by_targets(loss: BatchLoss) -> Tensor:
    """A loss divided by the number of its targets."""
    return loss.total / loss.targets.clamp(min=1)


def deep_loss(
    auxiliary: AuxiliaryLoss,
    layers: LayeredStack,
    x: Float[Tensor, "b l d"],
    ctx: Context,
    head: OutputHead,
    targets: Int[Tensor, "b l"],
    *,
    smoothing: float,
) -> BatchLoss:
    """The loss of a model from what comes out of its layers, with that which is learnt between them as extra."""
    outs = layers.layer_outputs(x, ctx)
    own = head.loss(outs[-1].y, targets, smoothing=smoothing)
    extra = auxiliary([out.y for out in outs], LossInputs(targets, ctx, head, own, smoothing))
    for out in outs:
        extra = extra + out.loss
    return own._replace(extra=extra)


@final
class LayerwiseNextTokenLoss(AuxiliaryLoss, TracksProgress):
    """Al-Rfou et al. 2019 (arXiv:1808.04444), "auxiliary losses": every layer predicts, and two tokens ahead as well.

    Layer l of n predicts the next token with a classifier of its own, until l / 2n of the training is done, so that
    after half of it the last layer alone is left. Wherever the next token is predicted, another classifier predicts the
    one after it, at half the weight; that of the last layer goes on to the end. None of these classifiers is needed
    afterwards. The loss at every place of a row, also an auxiliary one in the paper, is what language models do here
    anyway. `norm` stands before the classifiers between layers, for stacks whose layers leave the stream unnormed.
    """

    AHEAD = 0.5

    def __init__(self, dim: int, vocab: int, depth: int, *, norm: Callable[[], nn.Module] | None = None) -> None:
        super().__init__()
        self.depth = depth

        def head(number: int) -> ClassHead:
            return ClassHead(dim, vocab, transform=None if norm is None or number == depth - 1 else norm())

        self.next = nn.ModuleList(head(number) for number in range(depth - 1))
        self.ahead = nn.ModuleList(head(number) for number in range(depth))
        self.share = 0.0

    def set_progress(self, share: float) -> None:
        self.share = share

    # outside compiled code: with every layer that falls silent it would be compiled anew
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, streams: Sequence[Float[Tensor, "b l d"]], lesson: LossInputs) -> Tensor:
        later = two_ahead(lesson.targets, lesson.ctx.positions.segment_ids)

        def loss(head: nn.Module, x: Tensor, targets: Tensor) -> Tensor:
            assert isinstance(head, ClassHead)
            return mean_loss(head, x, targets, lesson.smoothing)

        # what follows the last layer, a norm, belongs to it
        whole = self.AHEAD * loss(self.ahead[-1], streams[-1], later)
        speaking = self.active_layers()
        for number in range(self.depth - 1):
            heads, x = (self.next[number], self.ahead[number]), streams[number]
            if number in speaking:
                whole = whole + loss(heads[0], x, lesson.targets) + self.AHEAD * loss(heads[1], x, later)
            else:
                # processes that average gradients wait for one of every weight
                whole = whole + 0.0 * sum(weight.sum() for head in heads for weight in head.parameters())
        return whole

    def active_layers(self) -> list[int]:
        """The layers below the last whose losses count at this point of the training, from 0 on."""
        return [number for number in range(self.depth - 1) if self.share < (number + 1) / (2 * self.depth)]


def two_ahead(targets: Int[Tensor, "b l"], segments: Int[Tensor, "b l"]) -> Int[Tensor, "b l"]:
    """The targets after the next: those of the following token, where it is of the same document."""
    later = torch.full_like(targets, IGNORE_INDEX)
    later[:, :-1] = targets[:, 1:]
    later[:, :-1].masked_fill_(segments[:, 1:] != segments[:, :-1], IGNORE_INDEX)
    return later
