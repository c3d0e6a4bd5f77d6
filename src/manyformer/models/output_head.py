"""From the residual stream to a distribution over classes: what every last part of a model promises."""

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from manyformer.batches import IGNORE_INDEX
from manyformer.models.model import BatchLoss, BatchScore, count_targets


class OutputHead(nn.Module, ABC):
    """Says how likely each of `classes` is, given the stream; logits are right up to a constant per token."""

    classes: int
    score_chunk: ClassVar[int] = 4096
    """Tokens whose logits are held at once while scoring."""

    @abstractmethod
    def forward(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b v"]: ...

    @abstractmethod
    def loss(self, x: Float[Tensor, "*b d"], targets: Int[Tensor, "*b"], *, smoothing: float) -> BatchLoss:
        """The summed cross entropy of all targets but the ignored ones."""

    def score(self, x: Float[Tensor, "*b d"], targets: Int[Tensor, "*b"]) -> BatchScore:
        """Negative log-likelihood and accuracy, a chunk of tokens at a time."""
        x, targets = x.reshape(-1, x.shape[-1]), targets.reshape(-1)
        nll = torch.zeros((), dtype=torch.float64, device="cpu")
        correct = torch.zeros((), dtype=torch.long, device=x.device)
        for part, wanted in zip(torch.split(x, self.score_chunk), torch.split(targets, self.score_chunk)):
            logits = self(part).float()
            nll = nll + F.cross_entropy(logits, wanted, ignore_index=IGNORE_INDEX, reduction="sum").double().cpu()
            correct = correct + (logits.argmax(-1) == wanted).sum()
        return BatchScore(nll, count_targets(targets), correct)
