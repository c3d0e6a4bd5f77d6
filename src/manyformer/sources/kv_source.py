"""The interface of key/value sources: the keys and values of a call, and the state that caches them."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from manyformer.core import Context, KeyOrigin, MemorySequence, State, TokenPositions
from manyformer.masks import Mask

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


class StoredKeys(NamedTuple):
    """All keys and values that one new token per row may attend to, and the next state.

    `visible` is broadcastable to (b, h, 1, s); None if every key is visible.
    """

    k: Float[Tensor, "b g s e"]
    v: Float[Tensor, "b g s f"]
    visible: Bool[Tensor, "#b #h 1 s"] | None
    state: State


class StoreStep(NamedTuple):
    """A cache for new tokens of rows that are one contiguous document each.

    `store` takes the keys and values of the new token, its positions and the state. `is_ready` says whether it serves
    these positions and this state; None if it always does. With `takes_several`, `store` also takes several consecutive
    tokens, whose `visible` is that of the last one."""

    store: Callable[[Tensor, Tensor, TokenPositions, State], StoredKeys]
    is_ready: Callable[[TokenPositions, State], bool] | None = None
    takes_several: bool = False


ReadMemory = Callable[[MemorySequence, ProjectKV, State], StoredKeys]
"""The keys and values of another sequence for tokens with segment id 0."""


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

    def decode_store(self, mask: Mask | None, heads: int, *, recurrent: bool) -> StoreStep | None:
        """The cache for one new token per row and a kernel with `mask`; None to decode by `forward`."""
        return None

    def decode_memory(self, mask: Mask | None) -> ReadMemory | None:
        """The reader of another sequence for one new token per row; None if keys are those of the tokens."""
        return None

    def remembered_inputs(self, mask: Mask | None) -> int | None:
        """The number of earlier inputs that states remember, if a query sees exactly these and its own; else None."""
        return None
