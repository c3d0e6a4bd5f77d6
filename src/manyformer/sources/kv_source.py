"""The interface of key/value sources: the keys and values of a call, and the state that caches them."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from manyformer.core import Context, State, TokenPositions

ProjectKV = Callable[[Tensor, TokenPositions], tuple[Tensor, Tensor]]
"""Projects a sequence (b, s, d) and its positions to keys (b, g, s, e), with the position applied, and values."""


class KeysValues(NamedTuple):
    """Keys and values of this call, their positions, and the next state."""

    k: Float[Tensor, "b g s e"]
    v: Float[Tensor, "b g s f"]
    positions: TokenPositions
    state: State = None
    loss: Tensor | float = 0.0


class KVShape(NamedTuple):
    """The number of key/value heads and their widths, as cached by a source."""

    kv_heads: int
    head_dim: int
    value_dim: int


class KVSource(nn.Module, ABC):
    """Selects the sequence that keys and values come from: the layer's input, an encoder's output, a memory.

    `recurrent` says that the kernel keeps a summary of earlier keys itself, so the source does not cache them.
    """

    @abstractmethod
    def forward(
        self, x: Float[Tensor, "b l d"], ctx: Context, project: ProjectKV, state: State, *, recurrent: bool
    ) -> KeysValues: ...

    def init_state(
        self,
        batch: int,
        shape: KVShape,
        *,
        recurrent: bool,
        capacity: int | None,
        device: torch.device,
        dtype: torch.dtype,
    ) -> State:
        """The state before any token."""
        return ()
