"""Which keys a causal mask may show to queries yet to come: what a cache must keep, and what it may forget."""

from functools import lru_cache

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from manyformer.masks.bounds import TokenBounds
from manyformer.masks.mask import Mask

FOREVER = 1 << 40
LOOKED_AT = 1 << 16
"""Whether a mask forgets anything is judged by this many positions."""

STRETCH = 1024


def never_evicted(mask: Mask, pos: Int[Tensor, "*n"]) -> Bool[Tensor, "*n"]:
    """Whether a key at each position may be seen by a query more than `mask.max_lookback` positions after it.

    All others are needed for no longer than that. The mask must have a reach, tokens must have no roles and no parts.
    """
    assert mask.max_lookback is not None
    one = torch.zeros_like(pos)
    queries = TokenBounds(
        pos + mask.max_lookback + 1, torch.full_like(pos, FOREVER), (one, one), (one, one), (one, one), {}
    )
    keys = TokenBounds(pos, pos, (one, one), (one, one), (one, one), {})
    return mask.bounds(queries, keys).any_visible.expand(pos.shape)


@lru_cache(maxsize=256)
def can_evict(mask: Mask) -> bool:
    """Whether a cache for this mask can stay smaller than the sequence."""
    if not mask.causal or mask.max_lookback is None or mask.max_lookback >= LOOKED_AT:
        return False
    # also where tensors are made elsewhere by default, as when a model is built without weights
    with torch.device("cpu"):
        return not bool(never_evicted(mask, torch.arange(LOOKED_AT)).all())


def is_never_evicted(mask: Mask, position: int) -> bool:
    """The same as `never_evicted` for one position; looked up, because a writer of tokens asks it of every one."""
    return _stretch(mask, position // STRETCH)[position % STRETCH]


@lru_cache(maxsize=256)
def _stretch(mask: Mask, number: int) -> list[bool]:
    with torch.device("cpu"):
        return never_evicted(mask, torch.arange(number * STRETCH, (number + 1) * STRETCH)).tolist()
