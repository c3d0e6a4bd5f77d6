"""Losses of a language model besides that of the next token, which help deep ones to train."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from manyformer.batches import IGNORE, TextBatch
from manyformer.hooks import Scheduled
from manyformer.models.head import Head


class Auxiliary(nn.Module, ABC):
    """More to be learnt from what comes out of each layer."""

    @abstractmethod
    def forward(self, streams: Sequence[Float[Tensor, "b l d"]], batch: TextBatch, *, smoothing: float) -> Tensor:
        """The sum of the losses, each a mean over its targets; `streams` are what comes out of the layers in turn."""


@final
class DeepTargets(Auxiliary, Scheduled):
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

        def head(number: int) -> Head:
            return Head(dim, vocab, transform=None if norm is None or number == depth - 1 else norm())

        self.next = nn.ModuleList(head(number) for number in range(depth - 1))
        self.ahead = nn.ModuleList(head(number) for number in range(depth))
        self.share = 0.0

    def advance(self, share: float) -> None:
        self.share = share

    # outside compiled code: with every layer that falls silent it would be compiled anew
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, streams: Sequence[Float[Tensor, "b l d"]], batch: TextBatch, *, smoothing: float) -> Tensor:
        later = two_ahead(batch.targets, batch.segments)

        def loss(head: nn.Module, x: Tensor, targets: Tensor) -> Tensor:
            assert isinstance(head, Head)
            found = head.loss(x, targets, smoothing=smoothing)
            return found.total / found.targets.clamp(min=1)

        # what follows the last layer, a norm, belongs to it
        whole = self.AHEAD * loss(self.ahead[-1], streams[-1], later)
        speaking = self.speaking()
        for number in range(self.depth - 1):
            heads, x = (self.next[number], self.ahead[number]), streams[number]
            if number in speaking:
                whole = whole + loss(heads[0], x, batch.targets) + self.AHEAD * loss(heads[1], x, later)
            else:
                # processes that average gradients wait for one of every weight
                whole = whole + 0.0 * sum(weight.sum() for head in heads for weight in head.parameters())
        return whole

    def speaking(self) -> list[int]:
        """The layers below the last whose losses count at this point of the training, from 0 on."""
        return [number for number in range(self.depth - 1) if self.share < (number + 1) / (2 * self.depth)]


def two_ahead(targets: Int[Tensor, "b l"], segments: Int[Tensor, "b l"] | None) -> Int[Tensor, "b l"]:
    """The targets after the next: those of the following token, where it is of the same document."""
    later = torch.full_like(targets, IGNORE)
    later[:, :-1] = targets[:, 1:]
    if segments is not None:
        later[:, :-1].masked_fill_(segments[:, 1:] != segments[:, :-1], IGNORE)
    return later
