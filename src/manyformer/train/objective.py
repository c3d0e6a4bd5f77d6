"""What a step minimises, as one module with one forward, so that compilation and sharding see a whole."""

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
    """The loss of a batch in training mode, its score otherwise, under the precision of the run."""

    def __init__(self, model: Model, *, smoothing: float, autocast: torch.dtype | None) -> None:
        super().__init__()
        self.model, self.smoothing, self.autocast = model, smoothing, autocast

    def forward(self, batch: Batch, state: State = None) -> BatchLoss | BatchScore:
        """With a state, of rows that go on from it, which only a language model has."""
        words = {} if state is None else {"state": state}
        with self._precision():
            if self.training:
                return self.model.loss(batch, smoothing=self.smoothing, **words)
            return self.model.score(batch, **words)

    def _precision(self) -> AbstractContextManager[object]:
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(self.model.device.type, dtype=self.autocast)


def targets_in(batch: Batch) -> int:
    """How many targets of a batch count; known before the forward pass, so that a step is normalised by all of them."""
    wanted = batch.labels if isinstance(batch, ClassificationBatch | ImageClassificationBatch) else batch.targets
    return int((wanted != IGNORE_INDEX).sum())


def tokens_in(batch: Batch) -> int:
    """How many tokens are learned from: the targets, or all that is read where only some tokens have a target."""
    if isinstance(batch, CausalLMBatch | Seq2SeqBatch):
        return targets_in(batch)
    if isinstance(batch, ImageClassificationBatch):
        return batch.pixels.numel()
    return batch.tokens.numel() if batch.segments is None else int((batch.segments != PADDING_SEGMENT).sum())


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch's tensors on `device`, copied while the device computes where that is possible."""
    if device.type == "cpu":
        return batch
    moved: Iterator[Tensor | None] = (
        None if part is None else part.pin_memory().to(device, non_blocking=True) for part in batch
    )
    return type(batch)(*moved)  # type: ignore[arg-type]
