"""Parallel strategies: a single process, or a replica per process (DDP); `fsdp_sharing` shards the weights (FSDP)."""

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
from manyformer.train.optimizers import named_optimizer_state, restore_optimizer_state
from manyformer.train.process_group import SINGLE_PROCESS_GROUP, ProcessGroup

OPTIMIZER_FILE = "optimizer.safetensors"


class ParallelStrategy(ABC):
    """Everything in training that depends on how a model is distributed over processes."""

    process_group: ProcessGroup

    @abstractmethod
    def prepare(self, objective: TrainingObjective) -> nn.Module:
        """Wrap `objective` into the module to call; called before the optimizer is built."""

    @abstractmethod
    def gradient_sync(self, prepared: nn.Module, *, last: bool) -> AbstractContextManager[object]:
        """Context of each forward and backward pass of a step; gradients are synchronized after the `last` one."""

    @abstractmethod
    def after_scoring(self, prepared: nn.Module) -> None:
        """Release buffers after a forward pass without backward pass."""

    @abstractmethod
    def full_norm(self, norm: Tensor) -> Tensor:
        """The norm of the full gradient as a plain tensor."""

    @abstractmethod
    def write(self, model: Model, optimizer: torch.optim.Optimizer, folder: Path) -> None:
        """Write this process's part of weights and optimizer into a folder that all processes can access."""

    @abstractmethod
    def read(self, model: Model, optimizer: torch.optim.Optimizer, folder: Path) -> None:
        """Restore weights and optimizer, whichever strategy and number of processes wrote them."""

    @abstractmethod
    def read_weights(self, model: Model, folder: Path) -> None:
        """Restore only the weights."""

    @abstractmethod
    def full_model(self, model: Model) -> Model:
        """The model with its full weights, in the main process."""


def write_unsharded(model: Model, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Write weights and optimizer as two files of unsharded tensors."""
    write_parts(model, folder)
    save_file(named_optimizer_state(model, optimizer), folder / OPTIMIZER_FILE)


def read_unsharded(model: Model, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Read the files of `write_unsharded`."""
    read_weights(model, folder)
    restore_optimizer_state(model, optimizer, load_file(folder / OPTIMIZER_FILE))


@final
class SingleProcess(ParallelStrategy):
    """One process holds the model and gets all data."""

    process_group = SINGLE_PROCESS_GROUP

    def prepare(self, objective: TrainingObjective) -> nn.Module:
        return objective

    def gradient_sync(self, prepared: nn.Module, *, last: bool) -> AbstractContextManager[object]:
        return nullcontext()

    def after_scoring(self, prepared: nn.Module) -> None:
        pass

    def full_norm(self, norm: Tensor) -> Tensor:
        return norm

    def write(self, model: Model, optimizer: torch.optim.Optimizer, folder: Path) -> None:
        write_unsharded(model, optimizer, folder)

    def read(self, model: Model, optimizer: torch.optim.Optimizer, folder: Path) -> None:
        read_full_tensors(model, optimizer, folder)

    def read_weights(self, model: Model, folder: Path) -> None:
        read_full_weights(model, folder)

    def full_model(self, model: Model) -> Model:
        return model


@final
class DDPStrategy(ParallelStrategy):
    """Every process holds a replica and gets a part of each batch; gradients are averaged (torch's DDP)."""

    def __init__(self, process_group: ProcessGroup) -> None:
        self.process_group = process_group

    def prepare(self, objective: TrainingObjective) -> nn.Module:
        device = objective.model.device
        ids = [device.index] if device.type == "cuda" else None
        return DistributedDataParallel(objective, device_ids=ids, gradient_as_bucket_view=True)

    def gradient_sync(self, prepared: nn.Module, *, last: bool) -> AbstractContextManager[object]:
        assert isinstance(prepared, DistributedDataParallel)
        return nullcontext() if last else prepared.no_sync()

    def after_scoring(self, prepared: nn.Module) -> None:
        pass

    def full_norm(self, norm: Tensor) -> Tensor:
        return norm

    def write(self, model: Model, optimizer: torch.optim.Optimizer, folder: Path) -> None:
        if self.process_group.is_main_process:
            write_unsharded(model, optimizer, folder)

    def read(self, model: Model, optimizer: torch.optim.Optimizer, folder: Path) -> None:
        read_full_tensors(model, optimizer, folder)

    def read_weights(self, model: Model, folder: Path) -> None:
        read_full_weights(model, folder)

    def full_model(self, model: Model) -> Model:
        return model


def read_full_tensors(model: Model, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Load an unsharded model and optimizer from a checkpoint, sharded or not."""
    from manyformer.train.fsdp_sharing import is_sharded, read_shards

    if is_sharded(folder):
        read_shards(model, optimizer, folder)
    else:
        read_unsharded(model, optimizer, folder)


def read_full_weights(model: Model, folder: Path) -> None:
    """Load the weights of an unsharded model from a checkpoint, sharded or not."""
    from manyformer.train.fsdp_sharing import is_sharded, read_shards

    if is_sharded(folder):
        read_shards(model, None, folder)
    else:
        read_weights(model, folder)
