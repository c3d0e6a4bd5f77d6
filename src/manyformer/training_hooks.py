"""What parts of a model do, and are told, while it is trained."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


class PostStepUpdate(ABC):
    """A part that changes between training steps by itself, such as random features that are drawn anew."""

    @abstractmethod
    def after_step(self, step: int) -> None:
        """Called after training step number `step`, the first being 1: be what that many steps make of it."""


def run_post_step_updates(model: nn.Module, step: int) -> None:
    """Let every part of `model` that renews itself do so; `manyformer.train` calls it after every step."""
    with torch.no_grad():
        for part in model.modules():
            if isinstance(part, PostStepUpdate):
                part.after_step(step)


class OwnOptimizerEpsilon:
    """A part whose own weights follow their gradient as it is, where an optimiser takes equal steps for others.

    Adam divides a gradient by its size, so that one that is tiny, but always points the same way, is obeyed like any
    other. With `optimizer_eps` added to what it divides by, far more than the gradient has, the step is that of
    gradient descent with momentum, at the rate / `optimizer_eps`."""

    optimizer_eps: float = 0.03


class StatefulAcrossBatches:
    """A part with a memory: its state is carried from batch to batch of a training whose rows go on."""


class OptionalOnLoad:
    """A part that a model may have been trained without: it begins with weights of its own where an earlier run is
    begun with that had none, and what that run had of it is left behind where it is there no longer."""


class WrapsLoadedModule:
    """A part that stands where another stood, which is now inside of it under the name `wrapped_name`."""

    wrapped_name: str


class RequiresPretrained:
    """A part that learns from what the rest of a model has learned before, which does not change any more.

    `requirement` says what it takes, for people.
    """

    requirement: str


class UsesNeighbours:
    """A part that attends to tokens that were looked up for each token of a language model."""


def uses_neighbours(model: nn.Module) -> bool:
    """Whether some part of `model` takes what was looked up."""
    return any(isinstance(part, UsesNeighbours) for part in model.modules())


class TracksProgress(ABC):
    """A part that does something else as training goes on, such as a loss that ends halfway."""

    @abstractmethod
    def set_progress(self, share: float) -> None:
        """Called before each training step with the share of the training that lies behind, from 0 to 1."""


def set_training_progress(model: nn.Module, share: float) -> None:
    """Tell every part of `model` that asks how far training has got; `manyformer.train` calls it before every step."""
    for part in model.modules():
        if isinstance(part, TracksProgress):
            part.set_progress(share)


@contextmanager
def eval_mode(model: object) -> Iterator[None]:
    """Dropout off for as long as it lasts, and back on after it where it was on; none where no module is."""
    if not isinstance(model, nn.Module):
        yield
        return
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
