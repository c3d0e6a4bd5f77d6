"""The output projection to classes with bounded logits."""

from typing import final

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from manyformer.batches import IGNORE_INDEX
from manyformer.models.output_head import BatchLoss, OutputHead, count_targets
from manyformer.position.score_cap import capped


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
        logits, targets = self(x).reshape(-1, self.classes), targets.reshape(-1)
        total = F.cross_entropy(
            logits, targets, ignore_index=IGNORE_INDEX, label_smoothing=label_smoothing, reduction="sum"
        )
        return BatchLoss(total, count_targets(targets))
