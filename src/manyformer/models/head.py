"""The output projection to classes, with a loss that never holds the logits of all tokens."""

from typing import final

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from manyformer.batches import IGNORE_INDEX
from manyformer.binding import TensorFn, bind_optional, has_hooks
from manyformer.costs.cost_model import COSTS
from manyformer.models.output_head import BatchLoss, OutputHead, count_targets

MIN_CHUNKED_CLASSES = COSTS.min_chunked_classes

TOKENS_PER_CHUNK = COSTS.tokens_per_loss_chunk


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
        x, targets = x.reshape(-1, x.shape[-1]), targets.reshape(-1)
        count = count_targets(targets)
        if self.weight.shape[0] < MIN_CHUNKED_CLASSES:
            logits = F.linear(x, self.weight, self.bias)
            total = F.cross_entropy(
                logits, targets, ignore_index=IGNORE_INDEX, label_smoothing=label_smoothing, reduction="sum"
            )
            return BatchLoss(total, count)
        # the chunk size is set explicitly because torch's default is several times slower on a CPU
        options = nn.LinearCrossEntropyOptions(
            batch_chunk_size=TOKENS_PER_CHUNK, chunking_method=None, acc_policy="compact"
        )
        total = F.linear_cross_entropy(
            x, self.weight, targets, linear_bias=self.bias, ignore_index=IGNORE_INDEX, reduction="sum", options=options
        )
        return BatchLoss(total + label_smoothing * self._logit_margin(x, targets) if label_smoothing else total, count)

    def decode_step(self) -> TensorFn:
        weight, bias, transform = self.weight, self.bias, bind_optional(self.transform)
        if has_hooks(self):
            return self
        return lambda x: F.linear(x if transform is None else transform(x), weight, bias)

    def _logit_margin(self, x: Float[Tensor, "n d"], targets: Int[Tensor, " n"]) -> Float[Tensor, ""]:
        """The target's logit minus the mean of all logits, summed over the targets that count.

        The chunked kernel has no label smoothing s, which mixes the loss of the target and the mean loss over all
        classes: (1 - s) (lse - z_y) + s (lse - mean z) = (lse - z_y) + s (z_y - mean z); this is the last term.
        """
        scored = targets != IGNORE_INDEX
        x, targets = x[scored], targets[scored]
        margin = (x * (F.embedding(targets, self.weight) - self.weight.mean(0))).sum()
        return margin if self.bias is None else margin + (self.bias[targets] - self.bias.mean()).sum()
