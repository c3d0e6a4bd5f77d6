"""Keys and values that one projection makes for all upper layers, which have queries alone (YOCO).

Sun et al. 2024, You Only Cache Once, arXiv:2405.05254: of N layers the upper N / 2 read the same cache, so that one
layer's keys and values are kept in place of N / 2.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from manyformer.nn.attention.attention import AttentionState, MultiHeadLayer, check_position, split_heads
from manyformer.nn.attention.kv_cache.kv_source import CacheSpec, KeysValues, KVShape, SelfSource
from manyformer.nn.core import (
    Chain,
    Context,
    Layer,
    LayeredStack,
    LayerOutput,
    MemorySequence,
    NamedLayers,
    RecordModule,
    State,
    TokenPositions,
)
from manyformer.nn.feed_forward.feedforward import init_glorot
from manyformer.nn.kernels.kernel import Kernel, KernelCall
from manyformer.nn.positions.position import NoPosition, Position
from manyformer.nn.runtime.head_selection import HeadSelection, select_head_inputs, select_head_outputs
from manyformer.nn.runtime.training_hooks import FusedRows


@final
class SharedKeys(RecordModule, FusedRows):
    """Keys, with their position, and values of the stream at one place, side by side for each token (section 2.1).

    `head_dim` is the width of a head's keys and values, of which there are `kv_heads`; `norm` precedes the
    projection. Its state is the cache of all layers that read it."""

    def __init__(
        self, dim: int, kv_heads: int, head_dim: int, *, norm: nn.Module, position: Position | None = None
    ) -> None:
        super().__init__()
        self.kv_heads = kv_heads
        self.head_dim = head_dim
        self.norm = norm
        self.position = NoPosition() if position is None else position
        self.kv_proj = nn.Linear(dim, 2 * kv_heads * head_dim)
        # keys and values together in the place of keys, so that a cache holds them in the order of tokens
        self.source = SelfSource()
        init_glorot(self.kv_proj)

    def row_parts(self) -> dict[str, tuple[int, ...]]:
        return {"kv_proj.weight": (self.kv_heads * self.head_dim,) * 2}

    def init_state(self, batch: int, *, capacity: int | None, device: torch.device, dtype: torch.dtype) -> State:
        """The empty cache; `capacity` preallocates it for so many tokens."""
        shape = KVShape(1, 2 * self.kv_heads * self.head_dim, 0)
        return self.source.init_state(CacheSpec(batch, shape, capacity, device, dtype))

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> KeysValues:
        return self.source(x, ctx, self._project, state)

    if TYPE_CHECKING:

        def __call__(self, x: Tensor, ctx: Context, state: State = None) -> KeysValues: ...

    def _project(self, x: Tensor, positions: TokenPositions) -> tuple[Tensor, Tensor]:
        projected = self.kv_proj(self.norm(x))
        if "key" in self.position.overridden:
            k, v = projected.chunk(2, -1)
            k = self.position.key(split_heads(k, self.kv_heads), positions)
            projected = torch.cat([k.transpose(1, 2).flatten(2), v], -1)
        keys_values = projected[:, None]
        return keys_values, keys_values[..., :0]


@final
class SharedKeysAttention(MultiHeadLayer):
    """Attention to the keys and values of `SharedKeys`, with queries and an output projection of its own.

    `kv_heads` and `head_dim` are those of the shared keys. Its state holds no token. Raises ValueError for a position
    that the kernel does not let act, and outside of a `SharedKeysStack`."""

    keeps_tokens = False

    def __init__(
        self,
        dim: int,
        heads: int,
        kernel: Kernel,
        *,
        kv_heads: int,
        head_dim: int,
        position: Position | None = None,
    ) -> None:
        super().__init__()
        self.heads = heads
        self.kv_heads = kv_heads
        self.head_dim = head_dim
        self.kernel = kernel
        self.position = NoPosition() if position is None else position
        check_position(self.position, kernel)
        self.q_proj = nn.Linear(dim, heads * head_dim)
        self.out_proj = nn.Linear(heads * head_dim, dim)
        init_glorot(self.q_proj, self.out_proj)

    def init_state(self, batch: int, *, capacity: int | None = None, device: torch.device, dtype: torch.dtype) -> State:
        return AttentionState((), self.kernel.init_state(batch, device=device, dtype=dtype))

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> LayerOutput:
        if ctx.memory is None:
            raise ValueError("SharedKeysAttention reads the keys of a SharedKeysStack, but ctx.memory is None")
        keys_values, key_positions = ctx.memory
        # views of the cache: nothing of it is copied
        k, v = (split_heads(part, self.kv_heads) for part in keys_values.chunk(2, -1))
        q = split_heads(self.q_proj(x), self.heads)
        if "query" in self.position.overridden:
            q = self.position.query(q, ctx.positions)
        kernel_state = None if state is None else state.kernel
        call = KernelCall(q, k, v, ctx.positions, key_positions, self.position, kernel_state, ctx.watch)
        y, kernel_state, loss = self.kernel(call)
        next_state = None if state is None else AttentionState((), kernel_state)
        return LayerOutput(self.out_proj(self.merge_heads(y)), next_state, loss)

    def select_heads(self, heads: tuple[int, ...]) -> HeadSelection:
        if self.kv_heads > 1:
            raise ValueError(f"all layers read the same {self.kv_heads} heads of keys: none can be removed from one")
        return HeadSelection(heads, self.heads, (0,), 1)

    def select_projections(self, selection: HeadSelection) -> None:
        select_head_outputs(self.q_proj, selection)
        select_head_inputs(self.out_proj, selection)

    def extra_repr(self) -> str:
        return f"{self.heads} heads, {self.kv_heads} shared ones of keys"


@final
class SharedKeysStack(NamedLayers, LayeredStack):
    """Layers in sequence; from the one named `border` on they may read what `keys` projects of that one's input.

    The state is the list of the layers' states, and the cache of the keys at its end."""

    def __init__(self, keys: SharedKeys, border: str, /, **layers: Layer) -> None:
        super().__init__(**layers)
        self.keys = keys
        self._border = list(layers).index(border)

    def in_order(self) -> list[Layer]:
        return [layer for layer in super().in_order() if isinstance(layer, Layer)]

    def init_state(self, batch: int, *, capacity: int | None = None, device: torch.device, dtype: torch.dtype) -> State:
        layers = [layer.init_state(batch, capacity=capacity, device=device, dtype=dtype) for layer in self.in_order()]
        return [*layers, self.keys.init_state(batch, capacity=capacity, device=device, dtype=dtype)]

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> LayerOutput:
        loss: Tensor | float = 0.0
        next_states: list[State] = []
        cache: State = None
        for index, layer in enumerate(self.in_order()):
            if index == self._border:
                ctx, cache = self._with_keys(x, ctx, state)
            x, next_state, layer_loss = layer(x, ctx, None if state is None else state[index])
            next_states.append(next_state)
            loss = loss + layer_loss
        return LayerOutput(x, None if state is None else [*next_states, cache], loss)

    def layer_outputs(self, x: Float[Tensor, "b l d"], ctx: Context) -> list[LayerOutput]:
        outputs: list[LayerOutput] = []
        for index, layer in enumerate(self.in_order()):
            if index == self._border:
                ctx, _ = self._with_keys(x, ctx, None)
            outputs.append(layer(x, ctx))
            x = outputs[-1].y
        return outputs

    def _with_keys(self, x: Tensor, ctx: Context, state: State) -> tuple[Context, State]:
        """The context with the keys and values that upper layers read, and the cache with those of this call."""
        keys = self.keys(x, ctx, None if state is None else state[-1])
        return replace(ctx, memory=MemorySequence(keys.k[:, 0], keys.positions)), keys.state


def share_keys(body: Layer, keys: SharedKeys, border: str) -> SharedKeysStack:
    """The layers of a chain under the same names, of which those from `border` on may read `keys`."""
    assert isinstance(body, Chain)
    names = list(body.places or body._modules)
    return SharedKeysStack(keys, border, **dict(zip(names, body.in_order(), strict=True)))
