"""The exponential moving average of the weights of a training, in float32, sharded where the weights are."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import final

import torch
from torch import Tensor, nn

from manyformer.base.files.json_records import DamagedFile
from manyformer.config import EmaConfig
from manyformer.models.model_files import local_tensor

AVERAGE_FILE = "ema.safetensors"
AVERAGE_KIND = "ema"
"""The averages of a checkpoint are named NAME/ema, as the state of the optimizer is named NAME/KIND."""


@final
class WeightAverage:
    """The moving average of each trainable weight: after every step, average = beta average + (1 - beta) weight.

    It begins with the weights before the first step. A tied weight has one average. What is not trained, and buffers
    such as running centroids, are those of the model: they are in place when the averages are, and never averaged."""

    def __init__(self, model: nn.Module, config: EmaConfig) -> None:
        assert config.beta is not None
        self.scores_average = config.evaluate
        """Whether validations score the averages, which are then those of the final model."""
        self._beta = config.beta
        self._warmup = config.warmup
        # `named_parameters` names a tied weight once
        self._weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        # float32 at least, in which 1 - beta is not rounded away
        self._averages = {
            name: weight.detach().to(torch.promote_types(weight.dtype, torch.float32), copy=True)
            for name, weight in self._weights.items()
        }

    def begin(self) -> None:
        """Begin anew with the weights of the moment."""
        for name, average in self._averages.items():
            _copy(average, self._weights[name])

    def beta(self, step: int) -> float:
        """The beta after training step `step`, counted from 1: small at first, when weights change fast."""
        if self._warmup:
            return min(self._beta, (1 + step) / (10 + step))
        return self._beta

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take the weights after training step `step` into the averages."""
        averages = [local_tensor(average) for average in self._averages.values()]
        weights = [local_tensor(weight.detach()) for weight in self._weights.values()]
        weights = [weight.to(average.dtype) for weight, average in zip(weights, averages, strict=True)]
        share = 1 - self.beta(step)
        for average, weight in zip(averages, weights, strict=True):
            average.lerp_(weight, share)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The averages in the place of the weights while the block runs."""
        weights = {name: weight.detach().clone() for name, weight in self._weights.items()}
        self.copy_to_weights()
        try:
            yield
        finally:
            for name, weight in weights.items():
                _copy(self._weights[name], weight)

    def copy_to_weights(self) -> None:
        """Set the weights of the model to their averages."""
        for name, average in self._averages.items():
            _copy(self._weights[name], average)

    def named_tensors(self) -> dict[str, Tensor]:
        """The averages under their names in checkpoints."""
        return {f"{name}/{AVERAGE_KIND}": average for name, average in self._averages.items()}

    def restore(self, tensors: Mapping[str, Tensor], file: Path) -> None:
        """Restore what `named_tensors` gave, read from `file`. Raises DamagedFile if it does not fit."""
        averages = self.named_tensors()
        for name in averages.keys() ^ tensors.keys():
            raise DamagedFile(f"{file} is damaged: {name:.80} is missing or belongs to no weight that is averaged")
        for name, average in averages.items():
            if tensors[name].shape != average.shape:
                raise DamagedFile(f"{file} is damaged: {name:.80} has the shape {tuple(tensors[name].shape)}")
            average.copy_(tensors[name])


@torch.no_grad()
def _copy(target: Tensor, source: Tensor) -> None:
    """Copy all numbers, of a shard those of this process."""
    local_tensor(target.detach()).copy_(local_tensor(source.detach()))
