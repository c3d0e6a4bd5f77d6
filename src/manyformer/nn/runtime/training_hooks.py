"""Interfaces between the modules of a model and the training loop: updates, progress, checkpoints of other models."""

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import nn


class PostStepUpdate(ABC):
    """A module that updates itself between training steps, such as random features that are redrawn."""

    @abstractmethod
    def after_step(self, step: int) -> None:
        """Update the module after training step `step`, counted from 1."""


def run_post_step_updates(model: nn.Module, step: int) -> None:
    """Call `after_step` of every `PostStepUpdate` in `model`; `manyformer.train` does so after every step."""
    # updates of weights and buffers are no part of the loss
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, PostStepUpdate):
                module.after_step(step)


class OwnOptimizerEpsilon:
    """A module whose own parameters need an epsilon of their own in Adam, `optimizer_eps`.

    Adam divides a gradient by its magnitude, so that a tiny gradient of constant sign moves a parameter as fast as a
    large one. With an `optimizer_eps` far above the gradient's magnitude the step is that of gradient descent with
    momentum, at the learning rate / `optimizer_eps`."""

    optimizer_eps: float = 0.03


class OwnLearningRate:
    """A module whose own parameters have `lr_scale` times the learning rate of the run, and no weight decay."""

    lr_scale: float = 1.0


class UndecayedParameters:
    """A module some of whose own parameters are no matrices that multiply activations, though they have two axes.

    `undecayed` names them: tables by position or distance, learned tokens, scales. Weight decay pulls them towards 0
    without a reason, as it would biases and norms. A parameter that is called `bias` need not be named. None means all
    of its parameters, also those of its parts."""

    undecayed: ClassVar[tuple[str, ...] | None]


class FusedRows(ABC):
    """A module with matrices that hold the rows of several matrices, one below another: keys, then values.

    What treats a matrix as a whole, such as an optimizer that orthogonalizes updates, treats each part by itself."""

    @abstractmethod
    def row_parts(self) -> dict[str, tuple[int, ...]]:
        """The numbers of rows of the parts, in their order, by the parameter's name in this module."""


def fused_row_parts(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """The rows of the parts of each fused matrix in `model`, by the parameter's name in `model`.

    A matrix that another module stands in for, such as an adapter, is none of them."""
    names = {name for name, _ in model.named_parameters()}
    parts = {
        f"{prefix}.{name}" if prefix else name: rows
        for prefix, module in model.named_modules()
        if isinstance(module, FusedRows)
        for name, rows in module.row_parts().items()
    }
    return {name: rows for name, rows in parts.items() if name in names}


class OptimizerHints:
    """A module that says which of its weights are matrices of hidden layers, where their owners do not tell.

    Such a matrix is what Muon orthogonalizes: the weight of a linear layer inside of a layer. `hidden_matrices` names
    others that are, `adamw_weights` those that are not: routers, gates and tables in the form of a linear layer. Names
    are those of parameters in this module, such as `proj.weight`."""

    hidden_matrices: tuple[str, ...] = ()
    adamw_weights: tuple[str, ...] = ()


class AddsPenalty(ABC):
    """A module that adds a term to the training loss of each pass, however often it was applied in it."""

    @abstractmethod
    def penalty(self) -> torch.Tensor:
        """The term, for a loss that is a mean over targets."""


class StatefulAcrossBatches:
    """A module whose state is carried from batch to batch while training on rows that continue.

    One that only may be has `carries_across_batches` False where it is not.
    """

    carries_across_batches: bool = True


class OptionalOnLoad:
    """A module that a checkpoint may lack or have in excess when another run's weights are loaded.

    It keeps its initial weights where the other run had none; weights of it that the model does not have are ignored.
    """


class WrapsLoadedModule:
    """A module that replaces another one of a loaded checkpoint and holds it as its child `wrapped_name`."""

    wrapped_name: str


class RequiresPretrained:
    """A module that is trained on top of a pretrained model, all other weights of which are frozen.

    `requirement` is a sentence about that for error messages.
    """

    requirement: str


class AddsToModule:
    """A module that stands in the place of another one, such as an adapter, and that no recipe builds.

    `how_to_merge` says how it becomes a part of the other one before the model is saved.
    """

    how_to_merge: str


class UsesNeighbours:
    """A module that attends to tokens retrieved for each token of a language model."""


def uses_neighbours(model: nn.Module) -> bool:
    """Whether `model` contains a module that attends to retrieved tokens."""
    return any(isinstance(module, UsesNeighbours) for module in model.modules())


class TracksProgress(ABC):
    """A module whose behavior depends on the training progress, such as a loss that ends halfway."""

    @abstractmethod
    def set_progress(self, fraction: float) -> None:
        """Set the completed fraction of the training, from 0 to 1; called before each training step."""


def set_training_progress(model: nn.Module, fraction: float) -> None:
    """Call `set_progress` of every `TracksProgress` in `model`; `manyformer.train` does so before every step."""
    for module in model.modules():
        if isinstance(module, TracksProgress):
            module.set_progress(fraction)
