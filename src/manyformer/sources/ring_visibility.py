"""Visibility of the keys in a ring cache, computed for many future tokens at once."""

from typing import final

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from manyformer.core import TokenPositions
from manyformer.masks import Mask
from manyformer.masks.eviction import never_evicted

LOOKAHEAD = 64
"""The number of tokens whose visible keys are computed at once."""


@final
class RingVisibility:
    """For rows that are one contiguous document each: what `mask` shows of a ring of `slots` and never-evicted keys."""

    def __init__(self, mask: Mask, heads: int, slots: int) -> None:
        self.mask, self.heads, self.slots = mask, heads, slots
        self._cache_key: tuple[int, int, torch.device] | None = None
        self._rows: list[Tensor] = []

    def __call__(self, position_ids: Int[Tensor, "b n"], position: int) -> Bool[Tensor, "1 h 1 n"]:
        """The keys visible to the token at `position`, whose own key is in the ring; h is 1 if heads agree.

        `position_ids` are those of the ring and of the never-evicted keys after it.
        """
        # never-evicted keys are the first so many of the document, so that their number identifies them
        cache_key = (position // LOOKAHEAD, position_ids.shape[1], position_ids.device)
        if cache_key != self._cache_key:
            visible = self._compute(position_ids[:1, self.slots :], cache_key[0] * LOOKAHEAD)
            self._rows, self._cache_key = list(torch.split(visible, 1, dim=2)), cache_key
        return self._rows[position % LOOKAHEAD]

    def _compute(self, never_evicted_ids: Int[Tensor, "1 m"], start: int) -> Bool[Tensor, "1 h lookahead n"]:
        device = never_evicted_ids.device
        query = torch.arange(start, start + LOOKAHEAD, device=device)[None, None, :, None]
        slot = torch.arange(self.slots, device=device)
        # the last position that is stored in the slot, unless its key is never evicted
        in_ring = query - (query - slot) % self.slots
        is_used = (in_ring >= 0) & ~never_evicted(self.mask, in_ring)
        stored = never_evicted_ids[:, None, None].expand(1, 1, LOOKAHEAD, -1)
        key_ids = torch.cat([in_ring, stored], -1)
        valid = torch.cat([is_used, torch.ones_like(stored, dtype=torch.bool)], -1)
        queries, keys = (TokenPositions(ids, torch.zeros_like(ids)) for ids in (query, key_ids))
        masks = [self.mask.for_head(head) for head in range(self.heads)] if self.mask.per_head else [self.mask]
        head_ids = torch.arange(len(masks), device=device)
        visible = [mask(head, queries, keys).expand(key_ids.shape) & valid for mask, head in zip(masks, head_ids)]
        return torch.cat(visible, 1)
