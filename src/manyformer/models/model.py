"""What every model has in common: how it was made, what its loss is, how it is saved."""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from manyformer.batches import IGNORE_INDEX, Batch
from manyformer.core import State
from manyformer.kernels.features.feature_map import FeatureMap
from manyformer.models.model_files import write_model
from manyformer.position import Position


class ModelOutput(NamedTuple):
    """What a model returns; `loss` holds auxiliary losses only, never the loss of the task."""

    logits: Float[Tensor, "b l v"]
    state: State = None
    loss: Tensor | float = 0.0


class BatchLoss(NamedTuple):
    """The loss of one batch: the sum over targets in nats, the number of targets, and auxiliary losses per batch.

    `state` is what the model remembers of it, where it was given a state to go on from.
    """

    total: Tensor
    targets: Tensor
    extra: Tensor | float = 0.0
    state: State = None


class BatchScore(NamedTuple):
    """Without smoothing: the negative log-likelihood of all targets in nats, their number, how many were likeliest.

    `state` is what the model remembers of the batch, where it was given a state to go on from.
    """

    nll: Tensor
    targets: Tensor
    correct: Tensor
    state: State = None


class ModelSpec(NamedTuple):
    """How to make this model again: the recipe and all of its keywords."""

    recipe: str
    keywords: dict[str, Any]


class Model(nn.Module, ABC):
    """A model that a recipe made; its `spec` is all that a checkpoint needs besides the weights."""

    spec: ModelSpec
    max_length: int | None = None
    """The longest sequence that the model allows; None where any length will do."""
    tokenizer: Any = None
    """What reads and writes text for it, or the source's and the target's; None where none was saved with it."""

    @abstractmethod
    def loss(self, batch: Batch, *, smoothing: float = 0.0) -> BatchLoss:
        """The training loss; `smoothing` spreads that share of each target over all classes (Szegedy et al. 2016)."""

    @abstractmethod
    def score(self, batch: Batch) -> BatchScore:
        """The plain negative log-likelihood and accuracy, to be called without gradients."""

    def save(self, path: str | Path) -> None:
        """Write the folder `path`: spec and weights, no pickle, replaced as a whole or not at all."""
        write_model(self, Path(path))

    def check_length(self, length: int) -> None:
        """Raise ValueError where a sequence of `length` tokens is longer than the model allows."""
        if self.max_length is not None and length > self.max_length:
            raise ValueError(
                f"{length} tokens are more than this model allows: it was built with longest={self.max_length}"
            )

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def state_dtype(self) -> torch.dtype:
        """The type that keys and values have under the present autocast."""
        kind = self.device.type
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
            return torch.get_autocast_dtype(kind)
        return next(self.parameters()).dtype


def longest_in(*parts: nn.Module) -> int | None:
    """How many positions there are for all of these parts: the fewest that any has; None where any number will do."""
    limits = (module for part in parts for module in part.modules() if isinstance(module, Position | FeatureMap))
    found = [each.max_length for each in limits if each.max_length is not None]
    return min(found, default=None)


def count_targets(targets: Int[Tensor, "..."]) -> Tensor:
    """How many targets count."""
    return (targets != IGNORE_INDEX).sum()
