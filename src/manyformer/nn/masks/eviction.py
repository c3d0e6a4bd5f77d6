"""Which keys future queries may see: what a cache may evict, and what is visible in a ring that overwrites old keys."""

from functools import lru_cache

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from manyformer.nn.core import RingLayout, TokenPositions
from manyformer.nn.masks.mask import Mask, TokenBounds

FOREVER = 1 << 40
"""A position beyond that of any query."""
TESTED_POSITIONS = 1 << 16
"""`can_evict` tests this many positions."""

CACHED_RANGE = 1024
"""A mask is evaluated and cached for this many positions at once to find keys that no query will see."""

LOOKAHEAD = 64
"""The number of tokens whose visible keys are computed at once."""


def never_evicted(mask: Mask, position_ids: Int[Tensor, "*n"]) -> Bool[Tensor, "*n"]:
    """Whether a key at each position may be visible to a query more than `mask.max_lookback` positions after it.

    All other keys may be evicted at that distance. `mask.max_lookback` must not be None, and tokens must have no roles
    and no parts.
    """
    assert mask.max_lookback is not None
    zeros = torch.zeros_like(position_ids)
    forever = torch.full_like(position_ids, FOREVER)
    keys = TokenBounds(position_ids, position_ids, (zeros, zeros), (zeros, zeros), (zeros, zeros), {})
    queries = keys._replace(first=position_ids + mask.max_lookback + 1, last=forever)
    return mask.bounds(queries, keys).any_visible.expand(position_ids.shape)


@lru_cache(maxsize=256)
def can_evict(mask: Mask) -> bool:
    """Whether a cache for this mask can be smaller than the sequence."""
    if not mask.causal or mask.max_lookback is None or mask.max_lookback >= TESTED_POSITIONS:
        return False
    # also if another default device is set, such as meta while a model is built without weights
    with torch.device("cpu"):
        return not bool(never_evicted(mask, torch.arange(TESTED_POSITIONS)).all())


def is_never_evicted(mask: Mask, position: int) -> bool:
    """`never_evicted` for one position, from a cached table, because decoding calls it for every token."""
    return _never_evicted_range(mask, position // CACHED_RANGE)[position % CACHED_RANGE]


def evicts_all(mask: Mask, length: int) -> bool:
    """Whether no position below `length` is `never_evicted`; False also if one of those that follow closely is."""
    return not any(_retains_any(mask, number) for number in range(-(-length // CACHED_RANGE)))


@lru_cache(maxsize=1024)
def _retains_any(mask: Mask, number: int) -> bool:
    return any(_never_evicted_range(mask, number))


@lru_cache(maxsize=256)
def _never_evicted_range(mask: Mask, number: int) -> list[bool]:
    with torch.device("cpu"):
        return never_evicted(mask, torch.arange(number * CACHED_RANGE, (number + 1) * CACHED_RANGE)).tolist()


def visible_in_ring(mask: Mask, heads: int, keys: TokenPositions) -> Bool[Tensor, "1 h 1 n"]:
    """The keys of a `RingLayout` that are visible to the token at its position, whose own key is in the ring.

    h is 1 if heads agree."""
    layout = keys.layout
    assert isinstance(layout, RingLayout)
    # never-evicted keys are the first so many of the document, so that their number identifies them
    stored = keys.position_ids.shape[1] - layout.slots
    position_ids = keys.position_ids
    block = layout.position // LOOKAHEAD
    rows = _visible_to_block(mask, heads, layout.slots, stored, block, position_ids.device)
    return rows[layout.position % LOOKAHEAD]


@lru_cache(maxsize=64)
@torch.inference_mode(mode=False)
@torch.no_grad()
def _visible_to_block(
    mask: Mask, heads: int, slots: int, stored: int, block: int, device: torch.device
) -> tuple[Bool[Tensor, "1 h 1 n"], ...]:
    """The keys visible to each of `LOOKAHEAD` tokens; a later call may need them for gradients."""
    query = torch.arange(block * LOOKAHEAD, (block + 1) * LOOKAHEAD, device=device)[None, None, :, None]
    slot = torch.arange(slots, device=device)
    # the last position that is stored in the slot, unless its key is never evicted
    in_ring = query - (query - slot) % slots
    is_used = (in_ring >= 0) & ~never_evicted(mask, in_ring)
    after_ring = _never_evicted_ids(mask, stored, (block + 1) * LOOKAHEAD, device).expand(1, 1, LOOKAHEAD, -1)
    key_ids = torch.cat([in_ring, after_ring], -1)
    valid = torch.cat([is_used, torch.ones_like(after_ring, dtype=torch.bool)], -1)
    queries, keys = (TokenPositions(ids, torch.zeros_like(ids)) for ids in (query, key_ids))
    if mask.per_head:
        masks = [mask.for_head(head) for head in range(heads)]
    else:
        masks = [mask]
    head_ids = torch.arange(len(masks), device=device)
    visible = [head_mask(head, queries, keys).expand(key_ids.shape) & valid for head_mask, head in zip(masks, head_ids)]
    return torch.split(torch.cat(visible, 1), 1, dim=2)


def _never_evicted_ids(mask: Mask, count: int, stop: int, device: torch.device) -> Int[Tensor, " m"]:
    """The positions of the first `count` keys that are never evicted."""
    position_ids = torch.arange(stop, device=device)
    return position_ids[never_evicted(mask, position_ids)][:count]
