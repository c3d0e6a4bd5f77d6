"""Visibility of the keys in a ring cache, computed for many future tokens at once."""

from functools import lru_cache

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from manyformer.core import RingLayout, TokenPositions
from manyformer.masks.eviction import never_evicted
from manyformer.masks.mask import Mask

LOOKAHEAD = 64
"""The number of tokens whose visible keys are computed at once."""


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
    visible = [each(head, queries, keys).expand(key_ids.shape) & valid for each, head in zip(masks, head_ids)]
    return torch.split(torch.cat(visible, 1), 1, dim=2)


def _never_evicted_ids(mask: Mask, count: int, stop: int, device: torch.device) -> Int[Tensor, " m"]:
    """The positions of the first `count` keys that are never evicted."""
    position_ids = torch.arange(stop, device=device)
    return position_ids[never_evicted(mask, position_ids)][:count]
