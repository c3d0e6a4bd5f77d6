"""The interface of key/value sources: the keys and values of a call, and the state that caches them."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from manyformer.core import Context, KeyOrigin, State, TokenPositions

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


class CacheSpec(NamedTuple):
    """What a source needs to create its state: rows, widths, preallocated columns (None: it grows), device and dtype.

    `recurrent` says that the kernel keeps a summary of earlier keys itself, so that the source caches none.
    """

    batch: int
    shape: KVShape
    capacity: int | None
    device: torch.device
    dtype: torch.dtype
    recurrent: bool = False

    def zeros(self, columns: int) -> tuple[Float[Tensor, "b g n e"], Float[Tensor, "b g n f"]]:
        """Keys and values of `columns` tokens per row, all zero."""
        batch, (kv_heads, *widths), _, device, dtype, _ = self
        k, v = (torch.zeros(batch, kv_heads, columns, width, device=device, dtype=dtype) for width in widths)
        return k, v


def require_no_grad() -> None:
    """Raise ValueError if gradients are enabled, which a state that is written in place would falsify."""
    if torch.is_grad_enabled():
        raise ValueError(
            "a state with capacity is written in place: use it under torch.no_grad(), or create it without capacity"
        )


class KVSource(nn.Module, ABC):
    """Selects the sequence that keys and values come from: the layer's input, an encoder's output, a memory."""

    key_origin: KeyOrigin = "stream"

    needs_heads: bool = False
    """Whether the module around the attention reads its projections, so that one head must remain."""

    @abstractmethod
    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, project: ProjectKV, state: State) -> KeysValues:
        """The keys and values that `x` attends to, made by `project`; a `state` is continued."""

    if TYPE_CHECKING:

        def __call__(self, x: Tensor, ctx: Context, project: ProjectKV, state: State) -> KeysValues: ...

    def init_state(self, spec: CacheSpec) -> State:
        """The state before any token."""
        return ()
