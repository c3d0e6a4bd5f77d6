"""Self-attention: keys and values from the stream itself, remembered in a cache."""

from typing import NamedTuple, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from manyformer.core import Context, ContiguousLayout, State, TokenPositions
from manyformer.sources.kv_source import KeysValues, KVShape, KVSource, ProjectKV


class KVCache(NamedTuple):
    """Keys, values and places of the tokens so far; of preallocated room, the first `length` columns are in use."""

    k: Float[Tensor, "b g s e"]
    v: Float[Tensor, "b g s f"]
    pos: Int[Tensor, "b s"]
    seg: Int[Tensor, "b s"]
    length: int = 0
    room: int | None = None
    plain: bool = True


@final
class SelfSource(KVSource):
    """The stream's own tokens, after those that the state remembers.

    The cache grows by concatenation; with `capacity` it is allocated once and written in place, which needs
    `torch.no_grad()` and refuses with a ValueError to take more tokens than it has room for.
    """

    def init_state(
        self, batch: int, shape: KVShape, *, folds: bool, capacity: int | None, device: torch.device, dtype: torch.dtype
    ) -> State:
        if folds:
            return ()
        size = capacity or 0
        k = torch.zeros(batch, shape.kv_heads, size, shape.key, device=device, dtype=dtype)
        v = torch.zeros(batch, shape.kv_heads, size, shape.value, device=device, dtype=dtype)
        # reserved columns hold the places of a plain document, so that the usual case need not write them
        pos = torch.arange(size, device=device).repeat(batch, 1)
        return KVCache(k, v, pos, torch.zeros_like(pos), 0, capacity)

    def forward(
        self, x: Float[Tensor, "b l d"], ctx: Context, project: ProjectKV, state: State, *, folds: bool
    ) -> KeysValues:
        k, v = project(x, ctx.positions)
        if state is None or folds:
            return KeysValues(k, v, ctx.positions, state)
        cache: KVCache = state
        cache = _append(cache, k, v, ctx.positions) if cache.room is None else _write(cache, k, v, ctx.positions)
        end = cache.length
        layout = ContiguousLayout() if cache.plain else None
        if cache.room is None:
            return KeysValues(cache.k, cache.v, TokenPositions(cache.pos, cache.seg, layout), cache)
        place = TokenPositions(cache.pos.narrow(1, 0, end), cache.seg.narrow(1, 0, end), layout)
        return KeysValues(cache.k.narrow(2, 0, end), cache.v.narrow(2, 0, end), place, cache)


def _continues(cache: KVCache, positions: TokenPositions) -> bool:
    """Whether old and new tokens together are one plain document from position 0 on."""
    return cache.plain and isinstance(positions.layout, ContiguousLayout) and positions.layout.start == cache.length


def _append(cache: KVCache, k: Tensor, v: Tensor, positions: TokenPositions) -> KVCache:
    return KVCache(
        torch.cat([cache.k, k], dim=2),
        torch.cat([cache.v, v], dim=2),
        torch.cat([cache.pos, positions.position_ids.expand(k.shape[0], -1)], dim=1),
        torch.cat([cache.seg, positions.segment_ids.expand(k.shape[0], -1)], dim=1),
        cache.length + k.shape[2],
        None,
        _continues(cache, positions),
    )


def _write(cache: KVCache, k: Tensor, v: Tensor, positions: TokenPositions) -> KVCache:
    begin, end = cache.length, cache.length + k.shape[2]
    assert cache.room is not None
    if end > cache.room:
        raise ValueError(f"the cache has room for capacity={cache.room} tokens, {end} are needed: start with more")
    if torch.is_grad_enabled():
        raise ValueError("a state with capacity is written in place: use it under torch.no_grad(), or start without")
    cache.k.narrow(2, begin, k.shape[2]).copy_(k)
    cache.v.narrow(2, begin, v.shape[2]).copy_(v)
    if _continues(cache, positions):
        return KVCache(cache.k, cache.v, cache.pos, cache.seg, end, cache.room)
    # places are copied before they differ from a plain document's: an earlier state may be gone back to
    pos, seg = cache.pos.clone(), cache.seg.clone()
    pos[:, begin:end] = positions.position_ids
    seg[:, begin:end] = positions.segment_ids
    return KVCache(cache.k, cache.v, pos, seg, end, cache.room, plain=False)
