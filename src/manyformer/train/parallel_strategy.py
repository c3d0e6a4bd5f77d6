"""Parallel strategies: a replica in each process (DDP); `fsdp_sharing` shards the weights (FSDP)."""

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import final

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from manyformer.batches import Batch
from manyformer.files.atomic_files import atomic_path
from manyformer.models import Model
from manyformer.models.model_files import read_tensors, read_weights
from manyformer.train.optimizers import named_optimizer_state, restore_optimizer_state
from manyformer.train.process_group import SINGLE_PROCESS_GROUP, ProcessGroup

OPTIMIZER_FILE = "optimizer.safetensors"


class ParallelStrategy(ABC):
    """Everything in training that depends on how a model is distributed over processes."""

    process_group: ProcessGroup

    @property
    def data_group(self) -> ProcessGroup:
        """The processes among which the rows of each batch are divided."""
        return self.process_group

    def local_batch(self, batch: Batch) -> Batch:
        """What this process computes of a batch of the `data_group`."""
        return batch

    @abstractmethod
    def prepare(self, model: Model) -> nn.Module:
        """Wrap `model` into the module to call; called before the optimizer is built."""

    @abstractmethod
    def gradient_sync(self, prepared: nn.Module, *, last: bool) -> AbstractContextManager[object]:
        """Context of each forward and backward pass of a step; gradients are synchronized after the `last` one."""

    @abstractmethod
    def after_scoring(self, prepared: nn.Module) -> None:
        """Release buffers after a forward pass without backward pass."""

    @abstractmethod
    def write(self, model: Model, optimizer: torch.optim.Optimizer, folder: Path) -> None:
        """Write this process's part of weights and optimizer into a folder that all processes can access."""

    @abstractmethod
    def read(self, model: Model, optimizer: torch.optim.Optimizer | None, folder: Path) -> None:
        """Restore the weights, and the optimizer unless None, whichever strategy and number of processes wrote them."""

    @abstractmethod
    def full_model(self, model: Model) -> Model:
        """The model with its full weights, in the main process."""


@final
class DDPStrategy(ParallelStrategy):
    """Every process holds a replica and gets a part of each batch; gradients are averaged (torch's DDP).

    A group of one process holds the model as it is.
    """

    def __init__(self, process_group: ProcessGroup = SINGLE_PROCESS_GROUP) -> None:
        self.process_group = process_group

    def prepare(self, model: Model) -> nn.Module:
        if self.process_group.size == 1:
            return model
        device = model.device
        ids = None if device.index is None else [device.index]
        return DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)

    def gradient_sync(self, prepared: nn.Module, *, last: bool) -> AbstractContextManager[object]:
        if last or not isinstance(prepared, DistributedDataParallel):
            return nullcontext()
        return prepared.no_sync()

    def after_scoring(self, prepared: nn.Module) -> None:
        pass

    def write(self, model: Model, optimizer: torch.optim.Optimizer, folder: Path) -> None:
        if self.process_group.is_main_process:
            model.write_files(folder)
            with atomic_path(folder / OPTIMIZER_FILE) as file:
                save_file(named_optimizer_state(model, optimizer), file)

    def read(self, model: Model, optimizer: torch.optim.Optimizer | None, folder: Path) -> None:
        # loads torch's distributed checkpoint engine
        from manyformer.train.sharded_checkpoints import is_sharded, read_shards

        if is_sharded(folder):
            read_shards(model, optimizer, folder)
            return
        read_weights(model, folder)
        if optimizer is not None:
            restore_optimizer_state(model, optimizer, read_tensors(folder, OPTIMIZER_FILE), folder / OPTIMIZER_FILE)

    def full_model(self, model: Model) -> Model:
        return model
