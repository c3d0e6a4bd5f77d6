"""Which tokens become keys and values, and what is kept of them for later."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from manyformer.core import Context, State, TokenPositions

ProjectKV = Callable[[Tensor, TokenPositions], tuple[Tensor, Tensor]]
"""From a stream (b, s, d) and its place to keys (b, g, s, e) and values (b, g, s, f), positions already in the keys."""


class KeysValues(NamedTuple):
    """What can be attended to in this call, and the state that remembers it."""

    k: Float[Tensor, "b g s e"]
    v: Float[Tensor, "b g s f"]
    positions: TokenPositions
    state: State = None
    loss: Tensor | float = 0.0


class KVShape(NamedTuple):
    """How wide the keys and values are that a source must keep."""

    kv_heads: int
    key: int
    value: int


class KVSource(nn.Module, ABC):
    """Chooses the stream that keys and values come from: the own one, an encoder's, a memory.

    `folds` says that the kernel keeps a summary of old keys itself, so that the source need not keep them.
    """

    @abstractmethod
    def forward(
        self, x: Float[Tensor, "b l d"], ctx: Context, project: ProjectKV, state: State, *, folds: bool
    ) -> KeysValues: ...

    def init_state(
        self, batch: int, shape: KVShape, *, folds: bool, capacity: int | None, device: torch.device, dtype: torch.dtype
    ) -> State:
        """The state before any token."""
        return ()
