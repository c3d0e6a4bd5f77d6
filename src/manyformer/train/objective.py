"""The training objective: model and loss as one module with one forward, for compilation and sharding."""

from typing import final

import torch
from torch import nn

from manyformer.batches import Batch
from manyformer.core import State, tree_map
from manyformer.models import BatchLoss, BatchScore, Model
from manyformer.training_hooks import AddsPenalty


@final
class TrainingObjective(nn.Module):
    """Computes the loss of a batch in training mode and its score otherwise, under the precision of the run."""

    def __init__(self, model: Model, *, label_smoothing: float, autocast: torch.dtype | None) -> None:
        super().__init__()
        self.model, self.label_smoothing, self.autocast = model, label_smoothing, autocast
        self._penalized = [module for module in model.modules() if isinstance(module, AddsPenalty)]

    def forward(self, batch: Batch, state: State = None) -> BatchLoss | BatchScore:
        """Loss or score of a batch; `state` is the decoding state its rows continue from, for language models only."""
        # the compiler of torch 2.11 cannot return tuples that `_replace` has made, so they are made anew
        return tree_map(lambda tensor: tensor, self._compute(batch, state))  # type: ignore[no-any-return]

    def _compute(self, batch: Batch, state: State) -> BatchLoss | BatchScore:
        with torch.autocast(self.model.device.type, dtype=self.autocast, enabled=self.autocast is not None):
            if self.training:
                loss = self.model.loss(batch, label_smoothing=self.label_smoothing, state=state)
                extra = sum((part.penalty() for part in self._penalized), loss.extra)
                return BatchLoss(loss.total, loss.targets, extra, loss.state)
            return self.model.score(batch, state=state)
