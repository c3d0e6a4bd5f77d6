"""The output projection to classes, with a loss that never holds the logits of all tokens."""

from typing import final

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from manyformer.batches import IGNORE_INDEX
from manyformer.binding import TensorFn, bind_optional, has_hooks
from manyformer.models.output_head import BatchLoss, OutputHead, count_targets
from manyformer.ops.chunked_cross_entropy import LossOptions, chunked_cross_entropy

MIN_CHUNKED_CLASSES = 8192
"""From this many classes on, the loss is computed in chunks of tokens: less memory and, on a CPU, less time."""

TOKENS_PER_CHUNK = 512
"""Tokens per chunk of the loss on a CPU."""

LOGITS_ELSEWHERE = 1 << 29
"""Logits of the loss that exist at once on other devices: 2 GiB in float32."""


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
        tokens_per_chunk = self._tokens_per_chunk(x)
        if x.shape[0] <= tokens_per_chunk:
            logits = F.linear(x, self.weight, self.bias)
            total = F.cross_entropy(
                logits, targets, ignore_index=IGNORE_INDEX, label_smoothing=label_smoothing, reduction="sum"
            )
            return BatchLoss(total, count)
        options = LossOptions(IGNORE_INDEX, label_smoothing, tokens_per_chunk)
        return BatchLoss(chunked_cross_entropy(x, self.weight, self.bias, targets, options), count)

    def decode_step(self) -> TensorFn:
        weight, bias, transform = self.weight, self.bias, bind_optional(self.transform)
        if has_hooks(self):
            return self
        return lambda x: F.linear(x if transform is None else transform(x), weight, bias)

    def _tokens_per_chunk(self, x: Float[Tensor, "n d"]) -> int:
        """Tokens whose logits are computed at a time: all of them where that is no slower."""
        # shapes without a device are those of a plan, which is held to measurements on a CPU
        if x.device.type not in ("cpu", "meta"):
            return LOGITS_ELSEWHERE // self.classes
        return x.shape[0] if self.classes < MIN_CHUNKED_CLASSES else TOKENS_PER_CHUNK
