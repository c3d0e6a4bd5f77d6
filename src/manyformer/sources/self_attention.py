"""Self-attention: keys and values of the layer's own input, with a cache of earlier tokens."""

from typing import NamedTuple, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from manyformer.core import Context, ContiguousLayout, State, StepLayout, TokenPositions
from manyformer.sources.kv_source import (
    CacheSpec,
    KeysValues,
    KVSource,
    ProjectKV,
    require_no_grad,
)
from manyformer.sources.static_cache import StaticKVCache, static_cache


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
