"""Self-attention: keys and values of the layer's own input, with a cache of earlier tokens."""

from typing import NamedTuple, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from manyformer.core import Context, ContiguousLayout, State, StepLayout, TokenPositions
from manyformer.masks import AllKeys, Causal, Mask
from manyformer.sources.kv_source import (
    CacheSpec,
    KeysValues,
    KVSource,
    ProjectKV,
    StoredKeys,
    StoreStep,
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
        cache: KVCache = state
        cache = (
            _append(cache, k, v, ctx.positions)
            if cache.capacity is None
            else _write_in_place(cache, k, v, ctx.positions)
        )
        end = cache.length
        layout = ContiguousLayout() if cache.is_contiguous else None
        if cache.capacity is None:
            return KeysValues(cache.k, cache.v, TokenPositions(cache.position_ids, cache.segment_ids, layout), cache)
        positions = TokenPositions(cache.position_ids.narrow(1, 0, end), cache.segment_ids.narrow(1, 0, end), layout)
        return KeysValues(cache.k.narrow(2, 0, end), cache.v.narrow(2, 0, end), positions, cache)

    def decode_store(self, mask: Mask | None, heads: int, *, recurrent: bool) -> StoreStep | None:
        if recurrent:
            return StoreStep(lambda k, v, positions, state: StoredKeys(k, v, None, state))
        return StoreStep(_store, _has_space, takes_several=True) if mask in (Causal(), AllKeys()) else None


def _make_static(state: KVCache | StaticKVCache, layout: StepLayout) -> StaticKVCache:
    if isinstance(state, StaticKVCache):
        return state
    k, v = (field.narrow(2, 0, state.length) for field in (state.k, state.v))
    position_ids, segment_ids = (ids.narrow(1, 0, state.length) for ids in (state.position_ids, state.segment_ids))
    return static_cache(k, v, TokenPositions(position_ids, segment_ids), layout)


def _has_space(positions: TokenPositions, cache: KVCache) -> bool:
    """Whether the tokens continue the one contiguous document of every row, and there are columns for them."""
    fits = cache.capacity is None or cache.length + positions.position_ids.shape[1] <= cache.capacity
    return fits and _stays_contiguous(cache, positions)


def _store(k: Tensor, v: Tensor, positions: TokenPositions, cache: KVCache) -> StoredKeys:
    """Append tokens that `_has_space` accepts."""
    if cache.capacity is None:
        cache = _append(cache, k, v, positions)
        return StoredKeys(cache.k, cache.v, None, cache)
    keys, values, position_ids, segment_ids, start, capacity, _ = cache
    count = k.shape[2]
    stop = start + count
    keys.narrow(2, start, count).copy_(k)
    values.narrow(2, start, count).copy_(v)
    next_cache = KVCache(keys, values, position_ids, segment_ids, stop, capacity)
    return StoredKeys(keys.narrow(2, 0, stop), values.narrow(2, 0, stop), None, next_cache)


def _stays_contiguous(cache: KVCache, positions: TokenPositions) -> bool:
    """Whether cached and new tokens together are one contiguous document from position 0 on."""
    return (
        cache.is_contiguous
        and isinstance(positions.layout, ContiguousLayout)
        and positions.layout.start == cache.length
    )


def _append(cache: KVCache, k: Tensor, v: Tensor, positions: TokenPositions) -> KVCache:
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
    start, stop = cache.length, cache.length + k.shape[2]
    assert cache.capacity is not None
    if stop > cache.capacity:
        raise ValueError(f"the cache was created with capacity={cache.capacity}, but {stop} tokens need space")
    require_no_grad()
    cache.k.narrow(2, start, k.shape[2]).copy_(k)
    cache.v.narrow(2, start, v.shape[2]).copy_(v)
    if _stays_contiguous(cache, positions):
        return KVCache(cache.k, cache.v, cache.position_ids, cache.segment_ids, stop, cache.capacity)
    # ids are copied before they differ from a contiguous document's, so that earlier states stay valid
    position_ids, segment_ids = cache.position_ids.clone(), cache.segment_ids.clone()
    position_ids[:, start:stop] = positions.position_ids
    segment_ids[:, start:stop] = positions.segment_ids
    return KVCache(cache.k, cache.v, position_ids, segment_ids, stop, cache.capacity, is_contiguous=False)
