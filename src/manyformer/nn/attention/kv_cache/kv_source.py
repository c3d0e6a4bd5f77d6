"""The sources of keys and values: their interface, and those that keep every token they have seen.

A source says which sequence attention reads, and keeps in its state what later calls need of it. Here are the layer's
own input, another sequence, and the layer's input where some of its tokens have halted.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from manyformer.nn.attention.kv_cache.static_cache import StaticKVCache, static_cache
from manyformer.nn.core import Context, ContiguousLayout, KeyOrigin, RecordModule, State, StepLayout, TokenPositions

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


class KVSource(RecordModule, ABC):
    """Selects the sequence that keys and values come from: the layer's input, an encoder's output, a memory."""

    key_origin: KeyOrigin = "stream"

    needs_heads: bool = False
    """Whether the module around the attention reads its projections, so that one head must remain."""

    keeps_inputs: bool = False
    """Whether its state in evaluation holds inputs of the layer, which are projected at every call."""

    keeps_ring: bool = False
    """Whether its state is a ring of keys, of which later ones replace those that no query can see any more."""

    @abstractmethod
    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, project: ProjectKV, state: State) -> KeysValues:
        """The keys and values that `x` attends to, made by `project`; a `state` is continued."""

    if TYPE_CHECKING:

        def __call__(self, x: Tensor, ctx: Context, project: ProjectKV, state: State) -> KeysValues: ...

    def init_state(self, spec: CacheSpec) -> State:
        """The state before any token."""
        return ()


class KVCache(NamedTuple):
    """Keys, values and positions of the tokens so far; the first `length` columns are in use.

    `capacity` is the number of preallocated columns, None if the cache grows. `is_contiguous` says that every row is
    one document from position 0 on.
    """

    k: Float[Tensor, "b g s e"]
    v: Float[Tensor, "b g s f"]
    position_ids: Int[Tensor, "b s"]
    segment_ids: Int[Tensor, "b s"]
    length: int = 0
    capacity: int | None = None
    is_contiguous: bool = True

    def append(self, k: Tensor, v: Tensor, positions: TokenPositions) -> "KVCache":
        """The cache with further tokens. Raises ValueError where there is no column for them."""
        return (_concatenate if self.capacity is None else _write_in_place)(self, k, v, positions)

    def keys_values(self) -> tuple[Float[Tensor, "b g l e"], Float[Tensor, "b g l f"]]:
        """The keys and values of the tokens so far."""
        if self.capacity is None:
            return self.k, self.v
        return self.k.narrow(2, 0, self.length), self.v.narrow(2, 0, self.length)

    def positions(self) -> TokenPositions:
        """The positions of the tokens so far."""
        layout = ContiguousLayout() if self.is_contiguous else None
        if self.capacity is None:
            return TokenPositions(self.position_ids, self.segment_ids, layout)
        position_ids, segment_ids = (ids.narrow(1, 0, self.length) for ids in (self.position_ids, self.segment_ids))
        return TokenPositions(position_ids, segment_ids, layout)


@final
class SelfSource(KVSource):
    """The layer's own input, after the tokens cached in the state.

    The cache grows by concatenation. With `capacity` it is allocated once and written in place, which needs
    `torch.no_grad()`; raises ValueError for more tokens than `capacity`.
    """

    def init_state(self, spec: CacheSpec) -> State:
        if spec.recurrent:
            return ()
        columns = spec.capacity or 0
        # reserved columns hold the positions of a contiguous document, so the common case need not write them
        position_ids = torch.arange(columns, device=spec.device).repeat(spec.batch, 1)
        return KVCache(*spec.zeros(columns), position_ids, torch.zeros_like(position_ids), 0, spec.capacity)

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, project: ProjectKV, state: State) -> KeysValues:
        k, v = project(x, ctx.positions)
        if not state:
            return KeysValues(k, v, ctx.positions, state)
        if isinstance(ctx.positions.layout, StepLayout):
            # the first static step turns the cache into one of fixed shape, later ones find it so
            stored = _make_static(state, ctx.positions.layout).store(k, v, ctx.positions.layout)
            return KeysValues(*stored, ctx.positions.layout.keys, stored)
        cache = state.append(k, v, ctx.positions)
        k, v = cache.keys_values()
        return KeysValues(k, v, cache.positions(), cache)


def _make_static(state: KVCache | StaticKVCache, layout: StepLayout) -> StaticKVCache:
    if isinstance(state, StaticKVCache):
        return state
    k, v = (field.narrow(2, 0, state.length) for field in (state.k, state.v))
    position_ids, segment_ids = (ids.narrow(1, 0, state.length) for ids in (state.position_ids, state.segment_ids))
    return static_cache(k, v, TokenPositions(position_ids, segment_ids), layout)


def _stays_contiguous(cache: KVCache, positions: TokenPositions) -> bool:
    """Whether cached and new tokens together are one contiguous document from position 0 on."""
    return (
        cache.is_contiguous
        and isinstance(positions.layout, ContiguousLayout)
        and positions.layout.start == cache.length
    )


def _concatenate(cache: KVCache, k: Tensor, v: Tensor, positions: TokenPositions) -> KVCache:
    return KVCache(
        torch.cat([cache.k, k], dim=2),
        torch.cat([cache.v, v], dim=2),
        torch.cat([cache.position_ids, positions.position_ids.expand(k.shape[0], -1)], dim=1),
        torch.cat([cache.segment_ids, positions.segment_ids.expand(k.shape[0], -1)], dim=1),
        cache.length + k.shape[2],
        None,
        _stays_contiguous(cache, positions),
    )


def _write_in_place(cache: KVCache, k: Tensor, v: Tensor, positions: TokenPositions) -> KVCache:
    start = cache.length
    stop = cache.length + k.shape[2]
    assert cache.capacity is not None
    if stop > cache.capacity:
        raise ValueError(f"the cache was created with capacity={cache.capacity}, but {stop} tokens need space")
    require_no_grad()
    cache.k.narrow(2, start, k.shape[2]).copy_(k)
    cache.v.narrow(2, start, v.shape[2]).copy_(v)
    if _stays_contiguous(cache, positions):
        return KVCache(cache.k, cache.v, cache.position_ids, cache.segment_ids, stop, cache.capacity)
    # ids are copied before they differ from a contiguous document's, so that earlier states stay valid
    position_ids = cache.position_ids.clone()
    segment_ids = cache.segment_ids.clone()
    position_ids[:, start:stop] = positions.position_ids
    segment_ids[:, start:stop] = positions.segment_ids
    return KVCache(cache.k, cache.v, position_ids, segment_ids, stop, cache.capacity, is_contiguous=False)


class ProjectedMemory(NamedTuple):
    """Keys and values of the encoder's output, None before the first call; empty after it for a recurrent kernel."""

    k: Float[Tensor, "b g s e"] | None = None
    v: Float[Tensor, "b g s f"] | None = None
    recurrent: bool = False


@final
class CrossAttentionSource(KVSource):
    """The sequence in `ctx.memory`, usually an encoder's output (Vaswani et al. 2017, section 3.2.3).

    With a state, its keys and values are projected in the first call and reused in all later calls; a recurrent kernel
    gets them in the first call only. Raises ValueError if `ctx.memory` is None.
    """

    key_origin = "source"

    def init_state(self, spec: CacheSpec) -> State:
        return ProjectedMemory(recurrent=spec.recurrent)

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, project: ProjectKV, state: State) -> KeysValues:
        if ctx.memory is None:
            raise ValueError("cross-attention needs a sequence to attend to, but ctx.memory is None")
        y, positions = ctx.memory
        if state is None:
            return KeysValues(*project(y, positions), positions)
        if state.k is None:
            k, v = project(y, positions)
            if state.recurrent:
                # copies: views would keep all keys of the source in memory
                cached = (k[:, :, :0].clone(), v[:, :, :0].clone())
            else:
                cached = (k, v)
            return KeysValues(k, v, positions, ProjectedMemory(*cached, state.recurrent))
        if state.recurrent:
            # the state of the kernel already contains these keys
            positions = TokenPositions(positions.position_ids[:, :0], positions.segment_ids[:, :0])
        return KeysValues(state.k, state.v, positions, state)


class HaltedKV(NamedTuple):
    """Keys and values of halted tokens, in their columns, and the places of the active tokens of this call.

    With rows flattened, active token `packed_index[i]` of the call is token `token_index[i]` of the sequence;
    `row_index` are the rows of the sequence that have active tokens. `state` is the cache of earlier calls.
    """

    state: State
    k: Float[Tensor, "b g l e"]
    v: Float[Tensor, "b g l f"]
    positions: TokenPositions
    token_index: Int[Tensor, " n"]
    packed_index: Int[Tensor, " n"]
    row_index: Int[Tensor, " r"]


@final
class HaltedTokenSource(KVSource):
    """`SelfSource` that also accepts a `HaltedKV` state, for calls with the active tokens of a sequence alone.

    The keys then are those of all tokens of the sequence, so that the cache does not depend on which tokens halted.
    """

    needs_heads = True

    def __init__(self) -> None:
        super().__init__()
        self.self_source = SelfSource()

    def init_state(self, spec: CacheSpec) -> State:
        return self.self_source.init_state(spec)

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, project: ProjectKV, state: State) -> KeysValues:
        if not isinstance(state, HaltedKV):
            return self.self_source(x, ctx, project, state)
        new_k, new_v = project(x, ctx.positions)
        # the keys of all tokens of the sequence, halted or not, in their own columns
        k = _insert_active(state.k, new_k, state)
        v = _insert_active(state.v, new_v, state)
        keys = self.update_cache(x, Context(state.positions), k, v, state.state)
        if len(state.row_index) == k.shape[0]:
            return keys
        rows = state.row_index
        position_ids, segment_ids = (ids.expand(k.shape[0], -1)[rows] for ids in keys.positions[:2])
        return KeysValues(keys.k[rows], keys.v[rows], TokenPositions(position_ids, segment_ids), keys.state)

    def update_cache(self, x: Tensor, ctx: Context, k: Tensor, v: Tensor, state: State) -> KeysValues:
        """Return keys and values of the cached tokens and of all tokens of the sequence, and the new cache."""
        # the source of ordinary tokens, which is handed what is projected already
        return self.self_source(x, ctx, lambda *_: (k, v), state)


def _insert_active(halted: Tensor, new: Tensor, state: HaltedKV) -> Tensor:
    """Insert the new keys or values of active tokens into those of all tokens, `halted` (b, g, l, e)."""
    flat = halted.transpose(1, 2).flatten(0, 1)
    active = new.transpose(1, 2).flatten(0, 1)[state.packed_index]
    # rows and tokens as one axis, since rows have different numbers of active tokens
    merged = flat.index_copy(0, state.token_index, active.to(flat.dtype))
    return merged.view(halted.shape[0], halted.shape[2], *merged.shape[1:]).transpose(1, 2)
