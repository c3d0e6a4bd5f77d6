"""Self-attention whose cache holds only what can still be seen."""

from typing import NamedTuple, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from manyformer.core import PADDING_SEGMENT, Context, ContiguousLayout, State, TokenPositions
from manyformer.masks import Mask
from manyformer.masks.eviction import can_evict, is_never_evicted, never_evicted
from manyformer.sources.kv_source import KeysValues, KVShape, KVSource, ProjectKV
from manyformer.sources.self_attention import SelfSource


class RingCache(NamedTuple):
    """Keys, values and places: first the slots of a ring, by position modulo their number, then what is kept for good.

    `length` counts the tokens so far while all rows are one plain document, else it is None. With `reserved` the slots
    are written in place.
    """

    k: Float[Tensor, "b g n e"]
    v: Float[Tensor, "b g n f"]
    pos: Int[Tensor, "b n"]
    seg: Int[Tensor, "b n"]
    length: int | None = 0
    reserved: bool = False


@final
class WindowSource(KVSource):
    """The stream's own tokens as far as `mask` can still show them to a later token.

    A window's cache is a ring of as many slots as the window reaches back; keys that are seen from everywhere, such as
    global ones or the summaries of blocks, are kept beside it. With `capacity` slots are overwritten in place, so that
    a state can be gone back to by one token only; without, every state stays as it was.
    """

    def __init__(self, mask: Mask) -> None:
        super().__init__()
        if not can_evict(mask):
            raise ValueError(f"WindowSource: {mask!r} may show all keys to later queries, there is nothing to forget")
        assert mask.max_lookback is not None
        self.mask, self.slots, self.all = mask, mask.max_lookback + 1, SelfSource()

    def init_state(
        self, batch: int, shape: KVShape, *, folds: bool, capacity: int | None, device: torch.device, dtype: torch.dtype
    ) -> State:
        if folds or (capacity is not None and capacity <= self.slots):
            # a ring would never turn
            return self.all.init_state(batch, shape, folds=folds, capacity=capacity, device=device, dtype=dtype)
        k = torch.zeros(batch, shape.kv_heads, self.slots, shape.key, device=device, dtype=dtype)
        v = torch.zeros(batch, shape.kv_heads, self.slots, shape.value, device=device, dtype=dtype)
        pos = torch.zeros(batch, self.slots, dtype=torch.long, device=device)
        return RingCache(k, v, pos, torch.full_like(pos, PADDING_SEGMENT), reserved=capacity is not None)

    def forward(
        self, x: Float[Tensor, "b l d"], ctx: Context, project: ProjectKV, state: State, *, folds: bool
    ) -> KeysValues:
        if not isinstance(state, RingCache):
            return self.all(x, ctx, project, state, folds=folds)  # type: ignore[no-any-return]
        if any(field is not None for field in (ctx.positions.roles, ctx.positions.part_ids, ctx.positions.tree)):
            raise ValueError("WindowSource: a ring keeps no roles, parts or trees of tokens; call without a state")
        if state.reserved and torch.is_grad_enabled():
            raise ValueError(
                "a state with capacity is written in place: use it under torch.no_grad(), or start without"
            )
        k, v = project(x, ctx.positions)
        after = self._write(state, k, v, ctx.positions)
        if x.shape[1] == 1:
            # what it overwrites is out of reach for this very token
            return KeysValues(after.k, after.v, TokenPositions(after.pos, after.seg), after)
        pos, seg = ctx.positions.position_ids.expand(k.shape[0], -1), ctx.positions.segment_ids.expand(k.shape[0], -1)
        place = TokenPositions(torch.cat([state.pos, pos], 1), torch.cat([state.seg, seg], 1))
        return KeysValues(torch.cat([state.k, k], 2), torch.cat([state.v, v], 2), place, after)

    def _write(self, ring: RingCache, k: Tensor, v: Tensor, positions: TokenPositions) -> RingCache:
        """The ring after these tokens; `ring` itself stays as it is wherever several tokens come at once."""
        begin, count = ring.length, k.shape[2]
        if begin is not None and isinstance(positions.layout, ContiguousLayout) and positions.layout.start == begin:
            if count == 1 and not is_never_evicted(self.mask, begin):
                return self._next(ring, k, v, positions, begin % self.slots)._replace(length=begin + 1)
            # known without a look at the device, which may hold no numbers at all
            new = torch.arange(begin, begin + count, device="cpu")
            stays = never_evicted(self.mask, new)
            near = ~stays & (new > begin + count - 1 - self.slots)
            ring = self._overwrite(ring, k, v, positions, near, begin)._replace(length=begin + count)
        else:
            stays = never_evicted(self.mask, positions.position_ids) & (positions.segment_ids != PADDING_SEGMENT)
            ring = self._scatter(ring, k, v, positions, stays)._replace(length=None)
            stays = stays.any(0)
        return self._keep(ring, k, v, positions, stays) if stays.any() else ring

    def _next(self, ring: RingCache, k: Tensor, v: Tensor, positions: TokenPositions, slot: int) -> RingCache:
        """One token of rows that agree: what writing a text does most of the time."""
        old = (ring.k, ring.v, ring.pos, ring.seg)
        new_k, new_v, pos, seg = old if ring.reserved else (part.clone() for part in old)
        for part, new in ((new_k, k), (new_v, v)):
            part.narrow(2, slot, 1).copy_(new)
        for part, new in ((pos, positions.position_ids), (seg, positions.segment_ids)):
            part.narrow(1, slot, 1).copy_(new)
        return ring._replace(k=new_k, v=new_v, pos=pos, seg=seg)

    def _overwrite(
        self, ring: RingCache, k: Tensor, v: Tensor, positions: TokenPositions, near: Tensor, begin: int
    ) -> RingCache:
        """Rows that agree: the same slots in all of them."""
        if not near.any():
            return ring
        columns = near.nonzero()[:, 0].to(k.device)
        slots = (columns + begin) % self.slots
        # several tokens at once may overwrite what the first of them still sees in an older state
        fresh = not ring.reserved or k.shape[2] > 1
        parts = [part.clone() if fresh else part for part in ring[:4]]
        for part, new in zip(parts, (k, v)):
            part.index_copy_(2, slots, new[:, :, columns])
        for part, numbers in zip(parts[2:], (positions.position_ids, positions.segment_ids)):
            part.index_copy_(1, slots, numbers[:, columns].expand(len(part), -1))
        k, v, pos, seg = parts
        return ring._replace(k=k, v=v, pos=pos, seg=seg)

    def _scatter(self, ring: RingCache, k: Tensor, v: Tensor, positions: TokenPositions, stays: Tensor) -> RingCache:
        """Rows that differ: each token into the slot of its position, if nothing later of its row belongs there."""
        real = positions.segment_ids != PADDING_SEGMENT
        order = torch.arange(k.shape[2], device=k.device)
        last = torch.where(real, order, 0).amax(1, keepdim=True)
        same = real & (positions.segment_ids == positions.segment_ids.gather(1, last))
        near = same & ~stays & (positions.position_ids > positions.position_ids.gather(1, last) - self.slots)
        # what is not written goes into a column that is thrown away
        slots = torch.where(near, positions.position_ids % self.slots, ring.pos.shape[1]).expand(k.shape[0], -1)
        wide = slots[:, None, :, None].expand_as
        padded = [torch.cat([part, part[:, :, :1]], 2) for part in ring[:2]]
        k, v = (part.scatter(2, wide(new), new)[:, :, :-1] for part, new in zip(padded, (k, v)))
        pos, seg = (
            torch.cat([part, part[:, :1]], 1).scatter(1, slots, new.expand_as(slots))[:, :-1]
            for part, new in zip(ring[2:4], (positions.position_ids, positions.segment_ids))
        )
        return ring._replace(k=k, v=v, pos=pos, seg=seg)

    def _keep(self, ring: RingCache, k: Tensor, v: Tensor, positions: TokenPositions, stays: Tensor) -> RingCache:
        """Put the columns in which any row has a token that stays behind all others."""
        columns = stays.nonzero()[:, 0].to(k.device)
        pos, seg = (part[:, columns].expand(k.shape[0], -1) for part in (positions.position_ids, positions.segment_ids))
        seg = torch.where(never_evicted(self.mask, pos), seg, PADDING_SEGMENT)
        return ring._replace(
            k=torch.cat([ring.k, k[:, :, columns]], 2),
            v=torch.cat([ring.v, v[:, :, columns]], 2),
            pos=torch.cat([ring.pos, pos], 1),
            seg=torch.cat([ring.seg, seg], 1),
        )
