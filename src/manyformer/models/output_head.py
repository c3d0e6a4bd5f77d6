"""The interface of output heads, which map the residual stream to a distribution over classes."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from manyformer.batches import IGNORE_INDEX
from manyformer.binding import TensorFn
from manyformer.core import State


class BatchLoss(NamedTuple):
    """The loss of one batch: the sum over targets in nats, the number of targets, and auxiliary losses per batch.

    `state` is the model's state after the batch if it was given a state before it.
    """

    total: Tensor
    targets: Tensor
    extra: Tensor | float = 0.0
    state: State = None


class BatchScore(NamedTuple):
    """The negative log-likelihood of all targets in nats without smoothing, their number, and how many were top-1.

    `state` is the model's state after the batch if it was given a state before it. `others` are further sums over the
    targets by name, the same names for every batch, which the task makes scores of.
    """

    nll: Tensor
    targets: Tensor
    correct: Tensor
    state: State = None
    others: Mapping[str, Tensor] = MappingProxyType({})

    def plus(self, score: "BatchScore") -> "BatchScore":
        """The sums of this batch and of one that continues it."""
        others = {name: value + score.others[name] for name, value in self.others.items()}
        return BatchScore(
            self.nll + score.nll, self.targets + score.targets, self.correct + score.correct, score.state, others
        )


class OutputHead(nn.Module, ABC):
    """Predicts a distribution over `classes` from the stream; logits are defined up to a constant per token."""

    classes: int
    score_chunk: ClassVar[int] = 4096
    """The number of tokens per chunk in `score`."""

    @abstractmethod
    def forward(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b v"]: ...

    @abstractmethod
    def loss(self, x: Float[Tensor, "*b d"], targets: Int[Tensor, "*b"], *, label_smoothing: float) -> BatchLoss:
        """The cross entropy summed over all targets that are not ignored."""

    def decode_step(self) -> TensorFn:
        """The logits in evaluation mode, bound to the current parameters."""
        return self

    def score(self, x: Float[Tensor, "*b d"], targets: Int[Tensor, "*b"]) -> BatchScore:
        """Negative log-likelihood and accuracy, computed in chunks of tokens."""
        x, targets = x.reshape(-1, x.shape[-1]), targets.reshape(-1)
        nll = torch.zeros((), dtype=torch.float64, device="cpu")
        correct = torch.zeros((), dtype=torch.long, device=x.device)
        for chunk, chunk_targets in zip(torch.split(x, self.score_chunk), torch.split(targets, self.score_chunk)):
            logits = self(chunk).float()
            loss = F.cross_entropy(logits, chunk_targets, ignore_index=IGNORE_INDEX, reduction="sum")
            nll = nll + loss.cpu().double()
            correct = correct + (logits.argmax(-1) == chunk_targets).sum()
        return BatchScore(nll, count_targets(targets), correct)


def count_targets(targets: Int[Tensor, "..."]) -> Tensor:
    """The number of targets that are not ignored."""
    return (targets != IGNORE_INDEX).sum()
