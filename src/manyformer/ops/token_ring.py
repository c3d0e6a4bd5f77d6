"""Processes in a ring, each of which holds adjacent columns of the same rows: what attention across them needs."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor


class TokenRing(ABC):
    """Process `rank` of `size`, in the order of their columns."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    @abstractmethod
    def send(self, tensors: Sequence[Tensor], rank: int) -> None:
        """Send tensors to a process."""

    @abstractmethod
    def receive(self, like: Sequence[Tensor], rank: int) -> list[Tensor]:
        """Receive tensors with these shapes from a process."""

    @abstractmethod
    def pass_on(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Send these to the next process; returns those of the previous one, which have the same shapes."""
