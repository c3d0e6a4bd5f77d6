"""The output head of models whose last layer computes the logits."""

from typing import final

import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from manyformer.batches import IGNORE_INDEX
from manyformer.models.output_head import BatchLoss, OutputHead, count_targets


@final
class LogitsHead(OutputHead):
    """The stream itself as the logits of `classes`."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.classes = classes

    def forward(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b v"]:
        return x

    def loss(self, x: Float[Tensor, "*b d"], targets: Int[Tensor, "*b"], *, label_smoothing: float) -> BatchLoss:
        logits, targets = x.reshape(-1, self.classes), targets.reshape(-1)
        total = F.cross_entropy(
            logits, targets, ignore_index=IGNORE_INDEX, label_smoothing=label_smoothing, reduction="sum"
        )
        return BatchLoss(total, count_targets(targets))
