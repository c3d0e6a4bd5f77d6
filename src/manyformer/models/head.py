"""Output heads, which map the residual stream to a distribution over classes, and their losses.

The loss of the usual head, `ClassHead`, never holds the logits of all tokens where there are many classes.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar, NamedTuple, final

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from manyformer.batches import IGNORE_INDEX
from manyformer.core import State
from manyformer.ops.chunked_cross_entropy import LossOptions, chunked_cross_entropy
from manyformer.position.content_positions import capped

MIN_CHUNKED_CLASSES = 8192
"""From this many classes on, the loss is computed in chunks of tokens: less memory and, on a CPU, less time."""

TOKENS_PER_CHUNK = 512
"""Tokens per chunk of the loss on a CPU."""

LOGITS_ELSEWHERE = 1 << 29
"""Logits of the loss that exist at once on other devices: 2 GiB in float32."""


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

    def score(self, x: Float[Tensor, "*b d"], targets: Int[Tensor, "*b"]) -> BatchScore:
        """Negative log-likelihood and accuracy, computed in chunks of tokens."""
        x = x.reshape(-1, x.shape[-1])
        targets = targets.reshape(-1)
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


@final
class ClassHead(OutputHead):
    """A projection to `classes` logits after an optional `transform`; `tied` is an embedding whose matrix is reused.

    Tying follows Press and Wolf (2017). The loss equals `torch.nn.functional.cross_entropy` of the logits.
    """

    def __init__(
        self,
        dim: int,
        classes: int,
        *,
        tied: nn.Embedding | None = None,
        transform: nn.Module | None = None,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.transform, self.classes = transform, classes
        self.weight = nn.Parameter(torch.empty(classes, dim)) if tied is None else tied.weight
        self.bias = nn.Parameter(torch.zeros(classes)) if bias else None
        if tied is None:
            nn.init.xavier_uniform_(self.weight)

    def forward(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b v"]:
        return F.linear(x if self.transform is None else self.transform(x), self.weight, self.bias)

    def loss(self, x: Float[Tensor, "*b d"], targets: Int[Tensor, "*b"], *, label_smoothing: float) -> BatchLoss:
        x = x if self.transform is None else self.transform(x)
        x = x.reshape(-1, x.shape[-1])
        targets = targets.reshape(-1)
        count = count_targets(targets)
        tokens_per_chunk = self._tokens_per_chunk(x)
        if x.shape[0] <= tokens_per_chunk:
            logits = F.linear(x, self.weight, self.bias)
            total = F.cross_entropy(
                logits, targets, ignore_index=IGNORE_INDEX, label_smoothing=label_smoothing, reduction="sum"
            )
            return BatchLoss(total, count)
        options = LossOptions(IGNORE_INDEX, label_smoothing, tokens_per_chunk)
        return BatchLoss(chunked_cross_entropy(x, self.weight, self.bias, targets, options), count)

    def _tokens_per_chunk(self, x: Float[Tensor, "n d"]) -> int:
        """Tokens whose logits are computed at a time: all of them where that is no slower."""
        # shapes without a device are those of a plan, which is held to measurements on a CPU
        if x.device.type not in ("cpu", "meta"):
            return LOGITS_ELSEWHERE // self.classes
        if self.classes < MIN_CHUNKED_CLASSES:
            return x.shape[0]
        return TOKENS_PER_CHUNK


@final
class CappedClassHead(OutputHead):
    """A projection to `classes` logits z, which become cap tanh(z / cap) (Gemma 2, 2024, arXiv:2408.00118, section 2).

    `tied` is an embedding whose matrix is reused."""

    def __init__(self, dim: int, classes: int, cap: float, *, tied: nn.Embedding | None = None) -> None:
        super().__init__()
        self.classes, self.cap = classes, cap
        self.weight = nn.Parameter(torch.empty(classes, dim)) if tied is None else tied.weight
        if tied is None:
            nn.init.xavier_uniform_(self.weight)

    def forward(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b v"]:
        return capped(F.linear(x, self.weight), self.cap)

    def loss(self, x: Float[Tensor, "*b d"], targets: Int[Tensor, "*b"], *, label_smoothing: float) -> BatchLoss:
        logits = self(x).reshape(-1, self.classes)
        targets = targets.reshape(-1)
        total = F.cross_entropy(
            logits, targets, ignore_index=IGNORE_INDEX, label_smoothing=label_smoothing, reduction="sum"
        )
        return BatchLoss(total, count_targets(targets))


@final
class LogitsHead(OutputHead):
    """The stream itself as the logits of `classes`."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.classes = classes

    def forward(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b v"]:
        return x

    def loss(self, x: Float[Tensor, "*b d"], targets: Int[Tensor, "*b"], *, label_smoothing: float) -> BatchLoss:
        logits = x.reshape(-1, self.classes)
        targets = targets.reshape(-1)
        total = F.cross_entropy(
            logits, targets, ignore_index=IGNORE_INDEX, label_smoothing=label_smoothing, reduction="sum"
        )
        return BatchLoss(total, count_targets(targets))
