"""Self-attention whose cache evicts keys that no later query can see: under the mask, or within its current span."""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple, Protocol, final, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from manyformer.nn.attention.kv_cache.kv_source import (
    CacheSpec,
    KeysValues,
    KVSource,
    ProjectKV,
    SelfSource,
    require_no_grad,
)
from manyformer.nn.attention.kv_cache.static_cache import TOKEN_AXES, StaticRing, static_ring
from manyformer.nn.core import PADDING_SEGMENT, Context, ContiguousLayout, RingLayout, State, StepLayout, TokenPositions
from manyformer.nn.masks import Mask, Window
from manyformer.nn.masks.eviction import can_evict, evicts_all, is_never_evicted, never_evicted


class RingCache(NamedTuple):
    """Keys, values and positions: first the slots of a ring, by position modulo their number, then never-evicted keys.

    `length` counts the tokens so far while all rows are one contiguous document, else it is None. With `reserved` the
    slots are written in place. `columns` counts the tokens of a row so far, with padding: all positions are below it.
    """

    k: Float[Tensor, "b g n e"]
    v: Float[Tensor, "b g n f"]
    position_ids: Int[Tensor, "b n"]
    segment_ids: Int[Tensor, "b n"]
    length: int | None = 0
    reserved: bool = False
    columns: int = 0

    def with_fields(self, fields: Iterable[Tensor], length: int | None, columns: int) -> "RingCache":
        """The cache with other keys, values, positions and segments."""
        k, v, position_ids, segment_ids = fields
        return RingCache(k, v, position_ids, segment_ids, length, self.reserved, columns)


@final
class WindowSource(KVSource):
    """The layer's own input and the cached tokens that `mask` can still show to a later token.

    The cache of a window is a ring with as many slots as the window reaches back; keys that are visible from
    everywhere, such as global tokens or summaries of blocks, are stored after the ring. With `capacity` slots are
    overwritten in place, so that a state can be rolled back by one token only; without, earlier states stay valid.
    """

    keeps_ring = True

    def __init__(self, mask: Mask) -> None:
        super().__init__()
        if not can_evict(mask):
            raise ValueError(f"WindowSource: {mask!r} may show every key to later queries, so no key can be evicted")
        assert mask.max_lookback is not None
        self.mask = mask
        # the query itself needs a slot beside the keys before it
        self.slots = mask.max_lookback + 1
        self.self_source = SelfSource()

    def init_state(self, spec: CacheSpec) -> State:
        if spec.recurrent or (spec.capacity is not None and spec.capacity <= self.slots):
            # a ring would never wrap around
            return self.self_source.init_state(spec)
        position_ids = torch.zeros(spec.batch, self.slots, dtype=torch.long, device=spec.device)
        segment_ids = torch.full_like(position_ids, PADDING_SEGMENT)
        reserved = spec.capacity is not None
        return RingCache(*spec.zeros(self.slots), position_ids, segment_ids, reserved=reserved)

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, project: ProjectKV, state: State) -> KeysValues:
        if not isinstance(state, RingCache | StaticRing):
            return self.self_source(x, ctx, project, state)
        if any(field is not None for field in (ctx.positions.roles, ctx.positions.part_ids, ctx.positions.tree)):
            raise ValueError(
                "WindowSource: the cache does not store roles, parts or trees of tokens; call without a state"
            )
        if isinstance(ctx.positions.layout, StepLayout):
            return self._store_static(state, *project(x, ctx.positions), ctx.positions, ctx.positions.layout)
        assert isinstance(state, RingCache)
        if state.reserved:
            require_no_grad()
        k, v = project(x, ctx.positions)
        new = (k, v, *(ids.expand(k.shape[0], -1) for ids in ctx.positions[:2]))
        ring = self._update_ring(state, new, ctx.positions.layout)
        if x.shape[1] == 1:
            # the key that it overwrites is outside the window of this token
            layout = None
            if ring.length is not None:
                layout = RingLayout(ring.length - 1, self.slots)
            return KeysValues(ring.k, ring.v, TokenPositions(ring.position_ids, ring.segment_ids, layout), ring)
        k, v, position_ids, segment_ids = _append(state, new)
        return KeysValues(k, v, TokenPositions(position_ids, segment_ids), ring)

    def _store_static(
        self, ring: RingCache | StaticRing, k: Tensor, v: Tensor, positions: TokenPositions, layout: StepLayout
    ) -> KeysValues:
        if isinstance(ring, RingCache):
            ring = static_ring(ring.k, ring.v, TokenPositions(ring.position_ids, ring.segment_ids), self.mask, layout)
        k, v, position_ids, segment_ids, _ = ring.store(k, v, positions)
        return KeysValues(k, v, TokenPositions(position_ids, segment_ids), ring)

    def _update_ring(self, ring: RingCache, new: Sequence[Tensor], layout: object) -> RingCache:
        """Add the fields of tokens to the ring; `ring` itself is not changed by several tokens at once."""
        start = ring.length
        count = new[0].shape[2]
        if start is not None and isinstance(layout, ContiguousLayout) and layout.start == start:
            # the step of decoding: no tensor is read, and only a number of Python decides
            if count == 1 and not is_never_evicted(self.mask, start):
                return self._write_one(ring, new, start)
            # computed on the CPU: no synchronization, and the device may be meta
            position_ids = torch.arange(start, start + count, device="cpu")
            never_evicted_columns = never_evicted(self.mask, position_ids)
            # of more tokens than slots only the last ones are kept
            in_window = ~never_evicted_columns & (position_ids > start + count - 1 - self.slots)
            ring = self._overwrite(ring, new, in_window, start)
        elif evicts_all(self.mask, ring.columns + count):
            # the host need not read whether there are such tokens, which a GPU would have to compute first
            return self._scatter(ring, new, torch.zeros_like(new[3], dtype=torch.bool))
        else:
            _, _, position_ids, segment_ids = new
            retained = never_evicted(self.mask, position_ids) & (segment_ids != PADDING_SEGMENT)
            ring = self._scatter(ring, new, retained)
            never_evicted_columns = retained.any(0)
        if not never_evicted_columns.any():
            return ring
        columns = never_evicted_columns.nonzero()[:, 0].to(ring.k.device)
        k, v, position_ids, segment_ids = _take_columns(new, columns)
        # other rows may have other tokens in these columns
        segment_ids = torch.where(never_evicted(self.mask, position_ids), segment_ids, PADDING_SEGMENT)
        return ring.with_fields(_append(ring, (k, v, position_ids, segment_ids)), ring.length, ring.columns)

    def _write_one(self, ring: RingCache, new: Sequence[Tensor], position: int) -> RingCache:
        """Write one token at the same slot of all rows, the common case of decoding."""
        # without reserved slots earlier states stay valid, as beam search needs them
        fields = ring[:4] if ring.reserved else [field.clone() for field in ring[:4]]
        for field, value, axis in zip(fields, new, TOKEN_AXES):
            field.narrow(axis, position % self.slots, 1).copy_(value)
        return ring.with_fields(fields, position + 1, ring.columns + 1)

    def _overwrite(self, ring: RingCache, new: Sequence[Tensor], in_window: Tensor, start: int) -> RingCache:
        """Write several tokens at the same slots of all rows."""
        columns = in_window.nonzero()[:, 0].to(ring.k.device)
        slots = (columns + start) % self.slots
        values = _take_columns(new, columns)
        # to a copy, because they may overwrite keys that the first of them still sees in an earlier state
        fields = (field.index_copy(axis, slots, value) for field, value, axis in zip(ring[:4], values, TOKEN_AXES))
        return ring.with_fields(fields, start + len(in_window), ring.columns + len(in_window))

    def _scatter(self, ring: RingCache, new: Sequence[Tensor], retained: Tensor) -> RingCache:
        """Write each token of rows that differ to the slot of its position, unless a later token of the row has it."""
        _, _, position_ids, segment_ids = new
        valid = segment_ids != PADDING_SEGMENT
        # the column of each row's last token, 0 where the row has none
        last = torch.where(valid, torch.arange(valid.shape[1], device=valid.device), 0).amax(1, keepdim=True)
        last_document = valid & (segment_ids == segment_ids.gather(1, last))
        in_window = last_document & ~retained & (position_ids > position_ids.gather(1, last) - self.slots)
        # tokens that are not stored are written to an additional column, which is dropped
        slots = torch.where(in_window, position_ids % self.slots, ring.position_ids.shape[1])
        fields = []
        for field, value, axis in zip(ring[:4], new, TOKEN_AXES):
            if axis == 1:
                index = slots
            else:
                index = slots[:, None, :, None].expand_as(value)
            # one more column, for tokens that are not kept
            padded = torch.cat([field, field.narrow(axis, 0, 1)], axis)
            fields.append(padded.scatter(axis, index, value).narrow(axis, 0, field.shape[axis]))
        return ring.with_fields(fields, None, ring.columns + valid.shape[1])


def _append(ring: RingCache, new: Sequence[Tensor]) -> list[Tensor]:
    """The fields of the ring followed by those of tokens."""
    return [torch.cat([field, value], axis) for field, value, axis in zip(ring[:4], new, TOKEN_AXES)]


def _take_columns(new: Sequence[Tensor], columns: Int[Tensor, " n"]) -> list[Tensor]:
    """The fields of the tokens in these columns."""
    return [value.index_select(axis, columns) for value, axis in zip(new, TOKEN_AXES)]


@runtime_checkable
class SpanReach(Protocol):
    """An object that knows the current maximum reach of attention."""

    def max_reach(self) -> int:
        """The largest number of preceding keys that any query can see with the current parameters."""


@final
class SpanCacheSource(KVSource):
    """The layer's own input and the cached tokens within the reach that `span_reach` has when the state is created.

    If the reach grows while a state is in use, queries see only the cached keys. An empty state adds no columns to the
    keys of the first tokens.
    """

    def __init__(self, span_reach: SpanReach) -> None:
        super().__init__()
        self.span_reach = span_reach
        self.self_source = SelfSource()

    def init_state(self, spec: CacheSpec) -> State:
        return _window_source(self.span_reach.max_reach() + 1).init_state(spec)

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, project: ProjectKV, state: State) -> KeysValues:
        if not isinstance(state, RingCache | StaticRing):
            return self.self_source(x, ctx, project, state)
        keys = _window_source(state.k.shape[2])(x, ctx, project, state)
        if isinstance(state, RingCache) and state.length == 0 and x.shape[1] > 1:
            # nothing is in the ring yet, and its empty slots would be columns of padding
            slots = state.k.shape[2]
            return KeysValues(keys.k[:, :, slots:], keys.v[:, :, slots:], ctx.positions, keys.state)
        return keys


@lru_cache(maxsize=64)
def _window_source(slots: int) -> WindowSource:
    """A window source, cached because it has no parameters or state of its own."""
    return WindowSource(Window(slots))
