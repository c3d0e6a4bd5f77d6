"""Caches of fixed shape, written at a column that a tensor holds, so that one captured step serves every token."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from manyformer.nn.core import PADDING_SEGMENT, StepLayout, TokenPositions
from manyformer.nn.masks import Mask
from manyformer.nn.masks.eviction import never_evicted

TOKEN_AXES = (2, 2, 1, 1)
"""The axes of tokens in keys, values, positions and segments."""


class NotStaticError(ValueError):
    """A layer cannot decode by steps of fixed operators and shapes; the message is the reason."""


class StaticKVCache(NamedTuple):
    """Keys and values of all columns of a stream, written in place; positions are those of the `StepLayout`."""

    k: Float[Tensor, "b g n e"]
    v: Float[Tensor, "b g n f"]

    def store(self, k: Tensor, v: Tensor, layout: StepLayout) -> "StaticKVCache":
        """Write one token, to a larger copy where the layout has more columns than the cache."""
        missing = layout.keys.position_ids.shape[1] - self.k.shape[2]
        if missing:
            cache = StaticKVCache(*(F.pad(field, (0, 0, 0, missing)) for field in self))
        else:
            cache = self
        for field, new in zip(cache, (k, v)):
            # one column for all rows
            field.index_copy_(2, layout.column[:1], new.to(field.dtype))
        return cache


class StaticRing(NamedTuple):
    """The keys that a mask can still show, each in the slot that `slots` names for its position, with their positions.

    Slots are those of a ring, by position modulo their number, and one of its own for each key that is never evicted.
    """

    k: Float[Tensor, "b g n e"]
    v: Float[Tensor, "b g n f"]
    position_ids: Int[Tensor, "b n"]
    segment_ids: Int[Tensor, "b n"]
    slots: Int[Tensor, "b p"]

    def store(self, k: Tensor, v: Tensor, positions: TokenPositions) -> "StaticRing":
        """Write tokens in place, of which no two of a row have one slot; padding to any slot."""
        # looked up by the position, which the host does not know
        index = self.slots.gather(1, positions.position_ids)
        for field, new, axis in zip(self, (k, v, *positions[:2]), TOKEN_AXES):
            if axis == 1:
                indices = index
            else:
                indices = index[:, None, :, None].expand_as(new)
            field.scatter_(axis, indices, new.to(field.dtype))
        return self


def static_cache(
    k: Float[Tensor, "b g s e"], v: Float[Tensor, "b g s f"], positions: TokenPositions, layout: StepLayout
) -> StaticKVCache:
    """A cache of all columns with these earlier tokens. Raises NotStaticError unless they are those of the stream."""
    length = k.shape[2]
    columns = layout.keys.position_ids.shape[1]
    position_ids, segment_ids = (ids[:, :length] for ids in layout.keys[:2])
    # the positions of padding have no meaning
    same_positions = (positions.position_ids == position_ids) | (segment_ids == PADDING_SEGMENT)
    same_tokens = same_positions & (positions.segment_ids == segment_ids)
    if not (same_tokens.all() and (layout.column == length).all()):
        raise NotStaticError("a cache holds other tokens than the text, so its columns are not those of the text")
    return StaticKVCache(*(F.pad(field, (0, 0, 0, columns - length)) for field in (k, v)))


def static_ring(
    k: Float[Tensor, "b g n e"],
    v: Float[Tensor, "b g n f"],
    positions: TokenPositions,
    mask: Mask,
    layout: StepLayout,
) -> StaticRing:
    """A ring for this mask, with a slot for every key that is never evicted, that holds these earlier tokens."""
    assert mask.max_lookback is not None
    rows = k.shape[0]
    ring = mask.max_lookback + 1
    all_positions = torch.arange(layout.position_limit, device=k.device)
    retained = never_evicted(mask, all_positions)
    # the first key that is never evicted gets the slot after the ring, the next one the slot after that
    slots = torch.where(retained, ring - 1 + retained.cumsum(0), all_positions % ring)
    # unused entries are written to one more column, which is dropped
    columns = ring + int(retained.sum())
    unused = positions.segment_ids == PADDING_SEGMENT
    index = torch.where(unused, columns, slots[positions.position_ids.clamp(max=layout.position_limit - 1)])
    fields = []
    for field, axis, fill in zip((k, v, *positions[:2]), TOKEN_AXES, (0, 0, 0, PADDING_SEGMENT)):
        shape = list(field.shape)
        shape[axis] = columns + 1
        if axis == 1:
            indices = index
        else:
            indices = index[:, None, :, None].expand_as(field)
        fields.append(field.new_full(shape, fill).scatter_(axis, indices, field).narrow(axis, 0, columns).contiguous())
    k, v, position_ids, segment_ids = fields
    return StaticRing(k, v, position_ids, segment_ids, slots.repeat(rows, 1))
