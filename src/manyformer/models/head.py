"""From the residual stream to classes: logits, and the loss without ever holding them all."""

from typing import final

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from manyformer.batches import IGNORE_INDEX
from manyformer.models.model import BatchLoss, count_targets
from manyformer.models.output_head import OutputHead

LARGE = 8192
"""From this many classes on the loss is taken in chunks of tokens: less memory and, on a CPU, less time."""

CHUNK = 512


@final
class ClassHead(OutputHead):
    """A projection to `classes` logits, after an optional `transform`; with `tied` it uses that embedding's matrix.

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

    def loss(self, x: Float[Tensor, "*b d"], targets: Int[Tensor, "*b"], *, smoothing: float) -> BatchLoss:
        x = x if self.transform is None else self.transform(x)
        x, targets = x.reshape(-1, x.shape[-1]), targets.reshape(-1)
        count = count_targets(targets)
        if self.weight.shape[0] < LARGE:
            logits = F.linear(x, self.weight, self.bias)
            total = F.cross_entropy(
                logits, targets, ignore_index=IGNORE_INDEX, label_smoothing=smoothing, reduction="sum"
            )
            return BatchLoss(total, count)
        # the chunk size is given because torch's own choice is several times slower on a CPU
        options = nn.LinearCrossEntropyOptions(batch_chunk_size=CHUNK, chunking_method=None, acc_policy="compact")
        total = F.linear_cross_entropy(
            x, self.weight, targets, linear_bias=self.bias, ignore_index=IGNORE_INDEX, reduction="sum", options=options
        )
        return BatchLoss(total + smoothing * self._lead(x, targets) if smoothing else total, count)

    def _lead(self, x: Float[Tensor, "n d"], targets: Int[Tensor, " n"]) -> Float[Tensor, ""]:
        """By how much the targets' logits exceed the mean of all logits, summed over the targets that count.

        The chunked kernel knows no smoothing, but s parts of the mean loss over all classes and 1 - s parts of the
        target's are (1 - s) (lse - z_y) + s (lse - mean z) = (lse - z_y) + s (z_y - mean z): this much is missing.
        """
        counted = targets != IGNORE_INDEX
        x, targets = x[counted], targets[counted]
        lead = (x * (F.embedding(targets, self.weight) - self.weight.mean(0))).sum()
        return lead if self.bias is None else lead + (self.bias[targets] - self.bias.mean()).sum()
