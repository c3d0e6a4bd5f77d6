"""Self-attention whose cache evicts keys that no later query can see under the mask."""

from typing import NamedTuple, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from manyformer.core import PADDING_SEGMENT, Context, ContiguousLayout, State, TokenPositions
from manyformer.masks import Mask
from manyformer.masks.eviction import can_evict, is_never_evicted, never_evicted
from manyformer.sources.kv_source import (
    CacheSpec,
    KeysValues,
    KVSource,
    ProjectKV,
    StoredKeys,
    StoreStep,
    require_no_grad,
)
from manyformer.sources.ring_visibility import RingVisibility
from manyformer.sources.self_attention import SelfSource


class RingCache(NamedTuple):
    """Keys, values and positions: first the slots of a ring, by position modulo their number, then never-evicted keys.

    `length` counts the tokens so far while all rows are one contiguous document, else it is None. With `reserved` the
    slots are written in place.
    """

    k: Float[Tensor, "b g n e"]
    v: Float[Tensor, "b g n f"]
    position_ids: Int[Tensor, "b n"]
    segment_ids: Int[Tensor, "b n"]
    length: int | None = 0
    reserved: bool = False


@final
class WindowSource(KVSource):
    """The layer's own input and the cached tokens that `mask` can still show to a later token.

    The cache of a window is a ring with as many slots as the window reaches back; keys that are visible from
    everywhere, such as global tokens or summaries of blocks, are stored after the ring. With `capacity` slots are
    overwritten in place, so that a state can be rolled back by one token only; without, earlier states stay valid.
    """

    def __init__(self, mask: Mask) -> None:
        super().__init__()
        if not can_evict(mask):
            raise ValueError(f"WindowSource: {mask!r} may show every key to later queries, so no key can be evicted")
        assert mask.max_lookback is not None
        self.mask, self.slots, self.self_source = mask, mask.max_lookback + 1, SelfSource()

    def init_state(self, spec: CacheSpec) -> State:
        if spec.recurrent or (spec.capacity is not None and spec.capacity <= self.slots):
            # a ring would never wrap around
            return self.self_source.init_state(spec)
        position_ids = torch.zeros(spec.batch, self.slots, dtype=torch.long, device=spec.device)
        segment_ids, reserved = torch.full_like(position_ids, PADDING_SEGMENT), spec.capacity is not None
        return RingCache(*spec.zeros(self.slots), position_ids, segment_ids, reserved=reserved)

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, project: ProjectKV, state: State) -> KeysValues:
        if not isinstance(state, RingCache):
            return self.self_source(x, ctx, project, state)
        if any(field is not None for field in (ctx.positions.roles, ctx.positions.part_ids, ctx.positions.tree)):
            raise ValueError(
                "WindowSource: the cache does not store roles, parts or trees of tokens; call without a state"
            )
        if state.reserved:
            require_no_grad()
        k, v = project(x, ctx.positions)
        ring = self._update_ring(state, k, v, ctx.positions)
        if x.shape[1] == 1:
            # the key that it overwrites is outside the window of this token
            return KeysValues(ring.k, ring.v, TokenPositions(ring.position_ids, ring.segment_ids), ring)
        new_ids = (ids.expand(k.shape[0], -1) for ids in ctx.positions[:2])
        position_ids, segment_ids = (torch.cat(ids, 1) for ids in zip(state[2:4], new_ids))
        positions = TokenPositions(position_ids, segment_ids)
        return KeysValues(torch.cat([state.k, k], 2), torch.cat([state.v, v], 2), positions, ring)

    def decode_store(self, mask: Mask | None, heads: int, *, recurrent: bool) -> StoreStep | None:
        if recurrent or mask is None:
            return None
        visibility = RingVisibility(mask, heads, self.slots)

        def store(k: Tensor, v: Tensor, positions: TokenPositions, ring: RingCache) -> StoredKeys:
            position = ring.length
            assert position is not None
            ring = self._write_one(ring, k, v, positions, position % self.slots)._replace(length=position + 1)
            return StoredKeys(ring.k, ring.v, visibility(ring.position_ids, position), ring)

        return StoreStep(store, self._overwrites_one_slot)

    def _overwrites_one_slot(self, positions: TokenPositions, ring: object) -> bool:
        """Whether the next token continues the one contiguous document of every row, and takes a slot of the ring."""
        layout = positions.layout
        return (
            isinstance(ring, RingCache)
            and isinstance(layout, ContiguousLayout)
            and layout.start == ring.length
            and not is_never_evicted(self.mask, layout.start)
        )

    def _update_ring(self, ring: RingCache, k: Tensor, v: Tensor, positions: TokenPositions) -> RingCache:
        """Add tokens to the ring; `ring` itself is not changed by several tokens at once."""
        start, count = ring.length, k.shape[2]
        if start is not None and isinstance(positions.layout, ContiguousLayout) and positions.layout.start == start:
            if count == 1 and not is_never_evicted(self.mask, start):
                return self._write_one(ring, k, v, positions, start % self.slots)._replace(length=start + 1)
            # computed on the CPU: no synchronization, and the device may be meta
            position_ids = torch.arange(start, start + count, device="cpu")
            never_evicted_columns = never_evicted(self.mask, position_ids)
            in_window = ~never_evicted_columns & (position_ids > start + count - 1 - self.slots)
            ring = self._overwrite(ring, k, v, positions, in_window, start)._replace(length=start + count)
        else:
            valid = positions.segment_ids != PADDING_SEGMENT
            retained = never_evicted(self.mask, positions.position_ids) & valid
            ring = self._scatter(ring, k, v, positions, retained)._replace(length=None)
            never_evicted_columns = retained.any(0)
        if not never_evicted_columns.any():
            return ring
        return self._append_never_evicted(ring, k, v, positions, never_evicted_columns)

    def _write_one(self, ring: RingCache, k: Tensor, v: Tensor, positions: TokenPositions, slot: int) -> RingCache:
        """Write one token at the same slot of all rows, the common case of decoding."""
        old = (ring.k, ring.v, ring.position_ids, ring.segment_ids)
        new_k, new_v, position_ids, segment_ids = old if ring.reserved else (field.clone() for field in old)
        new_k.narrow(2, slot, 1).copy_(k)
        new_v.narrow(2, slot, 1).copy_(v)
        position_ids.narrow(1, slot, 1).copy_(positions.position_ids)
        segment_ids.narrow(1, slot, 1).copy_(positions.segment_ids)
        return ring._replace(k=new_k, v=new_v, position_ids=position_ids, segment_ids=segment_ids)

    def _overwrite(
        self, ring: RingCache, k: Tensor, v: Tensor, positions: TokenPositions, in_window: Tensor, start: int
    ) -> RingCache:
        """Write several tokens at the same slots of all rows."""
        if not in_window.any():
            return ring
        columns = in_window.nonzero()[:, 0].to(k.device)
        slots = (columns + start) % self.slots
        # copied, because they may overwrite keys that the first of them still sees in an earlier state
        fields = [field.clone() for field in ring[:4]]
        for field, new in zip(fields, (k, v)):
            field.index_copy_(2, slots, new[:, :, columns])
        for field, ids in zip(fields[2:], (positions.position_ids, positions.segment_ids)):
            field.index_copy_(1, slots, ids[:, columns].expand(len(field), -1))
        k, v, position_ids, segment_ids = fields
        return ring._replace(k=k, v=v, position_ids=position_ids, segment_ids=segment_ids)

    def _scatter(
        self, ring: RingCache, k: Tensor, v: Tensor, positions: TokenPositions, never_evicted_columns: Tensor
    ) -> RingCache:
        """Write each token of rows that differ to the slot of its position, unless a later token of the row has it."""
        valid = positions.segment_ids != PADDING_SEGMENT
        order = torch.arange(k.shape[2], device=k.device)
        last = torch.where(valid, order, 0).amax(1, keepdim=True)
        last_document = valid & (positions.segment_ids == positions.segment_ids.gather(1, last))
        in_window = (
            last_document
            & ~never_evicted_columns
            & (positions.position_ids > positions.position_ids.gather(1, last) - self.slots)
        )
        # tokens that are not stored are written to an additional column, which is dropped
        slots = torch.where(in_window, positions.position_ids % self.slots, ring.position_ids.shape[1])
        slots = slots.expand(k.shape[0], -1)
        expand_as = slots[:, None, :, None].expand_as
        padded = [torch.cat([field, field[:, :, :1]], 2) for field in ring[:2]]
        k, v = (field.scatter(2, expand_as(new), new)[:, :, :-1] for field, new in zip(padded, (k, v)))
        position_ids, segment_ids = (
            torch.cat([field, field[:, :1]], 1).scatter(1, slots, new.expand_as(slots))[:, :-1]
            for field, new in zip(ring[2:4], (positions.position_ids, positions.segment_ids))
        )
        return ring._replace(k=k, v=v, position_ids=position_ids, segment_ids=segment_ids)

    def _append_never_evicted(
        self, ring: RingCache, k: Tensor, v: Tensor, positions: TokenPositions, never_evicted_columns: Tensor
    ) -> RingCache:
        """Append the columns in which any row has a never-evicted token."""
        columns = never_evicted_columns.nonzero()[:, 0].to(k.device)
        position_ids, segment_ids = (ids[:, columns].expand(k.shape[0], -1) for ids in positions[:2])
        segment_ids = torch.where(never_evicted(self.mask, position_ids), segment_ids, PADDING_SEGMENT)
        return ring._replace(
            k=torch.cat([ring.k, k[:, :, columns]], 2),
            v=torch.cat([ring.v, v[:, :, columns]], 2),
            position_ids=torch.cat([ring.position_ids, position_ids], 1),
            segment_ids=torch.cat([ring.segment_ids, segment_ids], 1),
        )
