"""The processes that train one model together, and the few things that they must agree on."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from manyformer.errors import UserError

_LONGEST_MESSAGE = 2000


class ProcessGroup(NamedTuple):
    """Process `rank` of `size`, the `local`-th on its machine; one process alone is a world too, and pays nothing."""

    rank: int = 0
    size: int = 1
    local: int = 0

    @property
    def first(self) -> bool:
        """Whether we are the one that writes and speaks."""
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all processes, the same on each; in place."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def sums(self, values: Sequence[float]) -> list[float]:
        """The sums of plain numbers, in double precision."""
        if self.size == 1:
            return list(values)
        found: list[float] = self.sum(torch.tensor(values, dtype=torch.float64, device=_device())).tolist()
        return found

    def of_first(self, value: float) -> float:
        """The first process's value."""
        return self.sums([value if self.first else 0.0])[0]

    def any(self, value: object) -> bool:
        """Whether it is true in any process."""
        return bool(self.sums([float(bool(value))])[0])

    def wait(self) -> None:
        """Until all processes have come here."""
        self.any(None)

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """A block that all processes come through, or none: where one fails, all raise, with its message."""
        if self.size == 1:
            yield
            return
        error: Exception | None = None
        try:
            yield
        except Exception as caught:
            error = caught
        if self.any(error is not None):
            message = self._message(error)
            raise error or UserError(message)

    def _message(self, error: Exception | None) -> str:
        """What the first of the processes that failed has to say."""
        said = ("" if error is None else str(error) or repr(error)).encode()[:_LONGEST_MESSAGE]
        bytes_of = torch.zeros(self.size, _LONGEST_MESSAGE, dtype=torch.int32)
        bytes_of[self.rank, : len(said)] = torch.tensor(list(said), dtype=torch.int32)
        rows = self.sum(bytes_of.to(_device())).tolist()
        return next(bytes(row).rstrip(b"\0").decode(errors="replace") for row in rows if any(row))

    @contextmanager
    def first_goes_ahead(self) -> Iterator[None]:
        """A block that the first process does before the others, so that they find what it made."""
        if self.size == 1:
            yield
            return
        if not self.first:
            self.wait()
        error: Exception | None = None
        try:
            yield
        except Exception as caught:
            error = caught
        if self.first:
            self.wait()
        if error is not None:
            raise error


ALONE = ProcessGroup()


def from_environment() -> ProcessGroup | None:
    """The world that torchrun's variables describe; None where no launcher started us."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    return ProcessGroup(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(os.environ.get("LOCAL_RANK", "0")))


@contextmanager
def joined(world: ProcessGroup, device: torch.device) -> Iterator[None]:
    """Connected with the other processes while the block runs."""
    if world.size == 1 or dist.is_initialized():
        yield
        return
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def _device() -> torch.device:
    """Where this group's collectives take their tensors from."""
    return torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
