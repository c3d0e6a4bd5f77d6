"""The processes that train one model together: reductions over them, errors raised by all, and replicas (DDP)."""

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple, final

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from manyformer.base.errors import UserError
from manyformer.base.files.atomic_files import atomic_path
from manyformer.models import Model
from manyformer.models.model_files import read_tensors, read_weights
from manyformer.nn.batches import Batch
from manyformer.nn.runtime.devices import collective_device, device_kind
from manyformer.training.optimizers import named_optimizer_state, restore_optimizer_state
from manyformer.training.weight_average import AVERAGE_FILE, WeightAverage

_MAX_MESSAGE_BYTES = 2000
_LONGEST_PREPARATION = timedelta(days=100)


class FailedElsewhere(UserError):
    """Another process of the group has failed, with this message."""


class ProcessFailed(UserError):
    """A process of the run was killed, has crashed or does not answer."""


class ProcessGroup(NamedTuple):
    """Process `rank` of `size`, number `local_rank` on its machine; a group of one process communicates nothing."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0

    @property
    def is_main_process(self) -> bool:
        """Whether this process writes files and reports events."""
        return self.rank == 0

    def all_reduce(self, values: Tensor) -> Tensor:
        """Sum over all processes in place, with the same result on each."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def sum_numbers(self, values: Sequence[float]) -> list[float]:
        """Sum plain numbers over all processes, in float64."""
        if self.size == 1:
            return list(values)
        # float64, in which counts of tokens are exact
        totals = self.all_reduce(torch.tensor(values, dtype=torch.float64, device=_collective_device()))
        return [float(total) for total in totals]

    def broadcast_from_main(self, value: float) -> float:
        """The main process's value, on all processes."""
        return self.sum_numbers([value if self.is_main_process else 0.0])[0]

    def any_process(self, value: object) -> bool:
        """Whether `value` is true in any process."""
        return bool(self.sum_numbers([float(bool(value))])[0])

    def barrier(self) -> None:
        """Wait until all processes have called this."""
        self.any_process(None)

    @contextmanager
    def raise_together(self) -> Iterator[None]:
        """A block that all processes complete, or none: if one fails, all raise, with its message."""
        if self.size == 1:
            yield
            return
        error: Exception | None = None
        try:
            yield
        except Exception as caught:
            error = caught
        if self.any_process(error is not None):
            message = self._message(error)
            # a process that has failed raises its own error, the others the message of the first
            raise error or FailedElsewhere(message)

    def _message(self, error: Exception | None) -> str:
        """The error message of the failed process with the lowest rank."""
        # collectives send tensors of one shape, so that every message has the same length
        text = ""
        if error is not None:
            text = str(error) or repr(error)
        encoded = text.encode()[:_MAX_MESSAGE_BYTES]
        message_bytes = torch.zeros(self.size, _MAX_MESSAGE_BYTES, dtype=torch.int32)
        message_bytes[self.rank, : len(encoded)] = torch.tensor(list(encoded), dtype=torch.int32)
        rows = self.all_reduce(message_bytes.to(_collective_device())).tolist()
        return next(bytes(row).rstrip(b"\0").decode(errors="replace") for row in rows if any(row))

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """A block that the main process runs before the others, so that they can use the files it writes.

        It may take longer than processes otherwise wait for each other.
        """
        waiting = None
        if self.size > 1:
            # a group of its own: the default one would end this wait by its timeout
            waiting = dist.new_group(backend="gloo", timeout=_LONGEST_PREPARATION)
        if waiting is not None and not self.is_main_process:
            dist.barrier(waiting)
        try:
            yield
        finally:
            if waiting is not None and self.is_main_process:
                dist.barrier(waiting)


SINGLE_PROCESS_GROUP = ProcessGroup()


def process_group_from_environment() -> ProcessGroup | None:
    """The process group that torchrun's environment variables describe; None if no launcher set them."""
    if not {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        return None
    return ProcessGroup(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(os.environ.get("LOCAL_RANK", "0")))


@contextmanager
def initialized_process_group(
    process_group: ProcessGroup, device: torch.device, *, timeout_minutes: float
) -> Iterator[None]:
    """Initialize torch.distributed for this group while the block runs; an operation fails after the timeout."""
    if process_group.size == 1 or dist.is_initialized():
        yield
        return
    timeout = timedelta(minutes=timeout_minutes)
    dist.init_process_group(device_kind(device).collectives, timeout=timeout)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def name_lost_process() -> Iterator[None]:
    """Raise ProcessFailed in the place of the errors of gloo and NCCL that tell of another process, not of this one."""
    try:
        yield
    except RuntimeError as error:
        # gloo raises a plain RuntimeError, which only its text tells from others
        is_network = isinstance(error, dist.DistBackendError | dist.DistNetworkError)
        if not is_network and "gloo/transport" not in str(error):
            raise
        problem = "another process of the run has gone or does not answer"
        remedy = "torchrun --max-restarts and Ray Train start all of them again, and the same command continues"
        raise ProcessFailed(f"{problem}; {remedy}") from error


def _collective_device() -> torch.device:
    """The device type on which the collectives of this group's backend work."""
    return collective_device(dist.get_backend())


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
    def write(
        self, model: Model, optimizer: torch.optim.Optimizer, folder: Path, average: WeightAverage | None = None
    ) -> None:
        """Write this process's part of weights, optimizer and average into a folder that all processes can access."""

    @abstractmethod
    def read(
        self,
        model: Model,
        optimizer: torch.optim.Optimizer | None,
        folder: Path,
        average: WeightAverage | None = None,
    ) -> None:
        """Restore the weights, and what else is given, whichever strategy and number of processes wrote them."""

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
        # DDP takes no ids on a CPU
        ids = None if device.index is None else [device.index]
        return DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)

    def gradient_sync(self, prepared: nn.Module, *, last: bool) -> AbstractContextManager[object]:
        if last or not isinstance(prepared, DistributedDataParallel):
            return nullcontext()
        return prepared.no_sync()

    def after_scoring(self, prepared: nn.Module) -> None:
        pass

    def write(
        self, model: Model, optimizer: torch.optim.Optimizer, folder: Path, average: WeightAverage | None = None
    ) -> None:
        if self.process_group.is_main_process:
            model.write_files(folder)
            with atomic_path(folder / OPTIMIZER_FILE) as file:
                save_file(named_optimizer_state(model, optimizer), file)
            if average is not None:
                with atomic_path(folder / AVERAGE_FILE) as file:
                    save_file(average.named_tensors(), file)

    def read(
        self,
        model: Model,
        optimizer: torch.optim.Optimizer | None,
        folder: Path,
        average: WeightAverage | None = None,
    ) -> None:
        # loads torch's distributed checkpoint engine
        from manyformer.training.sharded_checkpoints import is_sharded, read_shards

        if is_sharded(folder):
            read_shards(model, optimizer, folder, average)
            return
        read_weights(model, folder)
        if optimizer is not None:
            restore_optimizer_state(model, optimizer, read_tensors(folder, OPTIMIZER_FILE), folder / OPTIMIZER_FILE)
        if average is not None:
            average.restore(read_tensors(folder, AVERAGE_FILE), folder / AVERAGE_FILE)

    def full_model(self, model: Model) -> Model:
        return model
