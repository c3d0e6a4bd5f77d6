"""The training objective: model and loss as one module with one forward, for compilation and sharding."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import final

import torch
from torch import Tensor, nn

from manyformer.batches import (
    IGNORE_INDEX,
    Batch,
    CausalLMBatch,
    ClassificationBatch,
    ImageClassificationBatch,
    Seq2SeqBatch,
)
from manyformer.core import PADDING_SEGMENT, State
from manyformer.models import BatchLoss, BatchScore, Model


@final
class TrainingObjective(nn.Module):
    """Computes the loss of a batch in training mode and its score otherwise, under the precision of the run."""

    def __init__(self, model: Model, *, label_smoothing: float, autocast: torch.dtype | None) -> None:
        super().__init__()
        self.model, self.label_smoothing, self.autocast = model, label_smoothing, autocast

    def forward(self, batch: Batch, state: State = None) -> BatchLoss | BatchScore:
        """Loss or score of a batch; `state` is the decoding state its rows continue from, for language models only."""
        state_keywords = {} if state is None else {"state": state}
        with self._precision():
            if self.training:
                return self.model.loss(batch, label_smoothing=self.label_smoothing, **state_keywords)
            return self.model.score(batch, **state_keywords)

    def _precision(self) -> AbstractContextManager[object]:
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(self.model.device.type, dtype=self.autocast)


def count_targets(batch: Batch) -> int:
    """Number of targets that are not ignored; known before the forward pass, for normalization by the total."""
    targets = batch.labels if isinstance(batch, ClassificationBatch | ImageClassificationBatch) else batch.targets
    return int((targets != IGNORE_INDEX).sum())


def count_tokens(batch: Batch) -> int:
    """Number of tokens trained on: the targets, or all non-padding tokens if only some tokens have a target."""
    if isinstance(batch, CausalLMBatch | Seq2SeqBatch):
        return count_targets(batch)
    if isinstance(batch, ImageClassificationBatch):
        return batch.pixels.numel()
    return batch.tokens.numel() if batch.segments is None else int((batch.segments != PADDING_SEGMENT).sum())


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Copy the batch's tensors to `device`, asynchronously where possible."""
    if device.type == "cpu":
        return batch
    moved: Iterator[Tensor | None] = (
        None if tensor is None else tensor.pin_memory().to(device, non_blocking=True) for tensor in batch
    )
    return type(batch)(*moved)  # type: ignore[arg-type]
