"""How the processes of a run share its model: one alone, or a copy in each; shards.py has a share in each."""

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import final

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from manyformer.models import Model
from manyformer.models.model_files import read_weights, write_parts
from manyformer.train.objective import TrainingObjective
from manyformer.train.optimizers import named_state, restore_state
from manyformer.train.process_group import ALONE, ProcessGroup

WEIGHTS = "model.safetensors"
OPTIMISER = "optimiser.safetensors"


class ParallelStrategy(ABC):
    """What depends on how a model is spread over processes."""

    world: ProcessGroup

    @abstractmethod
    def prepare(self, objective: TrainingObjective) -> nn.Module:
        """What is to be called instead of `objective`; made before the optimiser."""

    @abstractmethod
    def one_pass(self, prepared: nn.Module, *, last: bool) -> AbstractContextManager[object]:
        """Around each forward and backward pass of a step; after the `last` gradients are those of all processes."""

    @abstractmethod
    def after_scoring(self, prepared: nn.Module) -> None:
        """Called after a forward pass that no backward pass follows."""

    @abstractmethod
    def norm(self, norm: Tensor) -> Tensor:
        """The norm of the whole gradient, as a plain tensor."""

    @abstractmethod
    def write(self, model: Model, optimiser: torch.optim.Optimizer, folder: Path) -> None:
        """Our part of weights and optimiser, into a folder that every process can see."""

    @abstractmethod
    def read(self, model: Model, optimiser: torch.optim.Optimizer, folder: Path) -> None:
        """Weights and optimiser as they were written, by whichever way of sharing on however many processes."""

    @abstractmethod
    def read_weights(self, model: Model, folder: Path) -> None:
        """The weights alone."""

    @abstractmethod
    def whole(self, model: Model) -> Model:
        """The model with all of its weights, in the first process."""


def write_whole(model: Model, optimiser: torch.optim.Optimizer, folder: Path) -> None:
    """Weights and optimiser as two files of plain tensors."""
    write_parts(model, folder)
    save_file(named_state(model, optimiser), folder / OPTIMISER)


def read_whole(model: Model, optimiser: torch.optim.Optimizer, folder: Path) -> None:
    """What `write_whole` wrote."""
    read_weights(model, folder)
    restore_state(model, optimiser, load_file(folder / OPTIMISER))


@final
class SingleProcess(ParallelStrategy):
    """One process has everything."""

    world = ALONE

    def prepare(self, objective: TrainingObjective) -> nn.Module:
        return objective

    def one_pass(self, prepared: nn.Module, *, last: bool) -> AbstractContextManager[object]:
        return nullcontext()

    def after_scoring(self, prepared: nn.Module) -> None:
        pass

    def norm(self, norm: Tensor) -> Tensor:
        return norm

    def write(self, model: Model, optimiser: torch.optim.Optimizer, folder: Path) -> None:
        write_whole(model, optimiser, folder)

    def read(self, model: Model, optimiser: torch.optim.Optimizer, folder: Path) -> None:
        read_any(model, optimiser, folder)

    def read_weights(self, model: Model, folder: Path) -> None:
        read_any_weights(model, folder)

    def whole(self, model: Model) -> Model:
        return model


@final
class DDPStrategy(ParallelStrategy):
    """Every process has a copy and sees a part of each batch; gradients are averaged (torch's DDP)."""

    def __init__(self, world: ProcessGroup) -> None:
        self.world = world

    def prepare(self, objective: TrainingObjective) -> nn.Module:
        device = objective.model.device
        ids = [device.index] if device.type == "cuda" else None
        return DistributedDataParallel(objective, device_ids=ids, gradient_as_bucket_view=True)

    def one_pass(self, prepared: nn.Module, *, last: bool) -> AbstractContextManager[object]:
        assert isinstance(prepared, DistributedDataParallel)
        return nullcontext() if last else prepared.no_sync()

    def after_scoring(self, prepared: nn.Module) -> None:
        pass

    def norm(self, norm: Tensor) -> Tensor:
        return norm

    def write(self, model: Model, optimiser: torch.optim.Optimizer, folder: Path) -> None:
        if self.world.first:
            write_whole(model, optimiser, folder)

    def read(self, model: Model, optimiser: torch.optim.Optimizer, folder: Path) -> None:
        read_any(model, optimiser, folder)

    def read_weights(self, model: Model, folder: Path) -> None:
        read_any_weights(model, folder)

    def whole(self, model: Model) -> Model:
        return model


def read_any(model: Model, optimiser: torch.optim.Optimizer, folder: Path) -> None:
    """Weights and optimiser in one piece, from a checkpoint in one piece or in shards."""
    from manyformer.train.fsdp_sharing import is_sharded, read_shards

    if is_sharded(folder):
        read_shards(model, optimiser, folder)
    else:
        read_whole(model, optimiser, folder)


def read_any_weights(model: Model, folder: Path) -> None:
    """The weights in one piece, from a checkpoint in one piece or in shards."""
    from manyformer.train.fsdp_sharing import is_sharded, read_shards

    if is_sharded(folder):
        read_shards(model, None, folder)
    else:
        read_weights(model, folder)
