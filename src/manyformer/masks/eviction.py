"""The keys that a causal mask may show to future queries: which cache entries may be evicted."""

from functools import lru_cache

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from manyformer.masks.bounds import TokenBounds
from manyformer.masks.mask import Mask

FOREVER = 1 << 40
"""A position beyond that of any query."""
TESTED_POSITIONS = 1 << 16
"""`can_evict` tests this many positions."""

CACHED_RANGE = 1024
"""A mask is evaluated and cached for this many positions at once to find keys that no query will see."""


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
