"""Which keys of a ring the next tokens see, looked up for many of them at once."""

from typing import final

import torch
from jaxtyping import Bool
from torch import Tensor

from manyformer.core import TokenPositions
from manyformer.masks import Mask
from manyformer.masks.eviction import never_evicted
from manyformer.sources.window_cache import RingCache

STRETCH = 64
"""So many tokens are looked ahead."""


@final
class Seen:
    """For rows that all are one plain document: what `mask` shows of a ring of `slots`, and of the keys kept beside."""

    def __init__(self, mask: Mask, heads: int, slots: int) -> None:
        self.mask, self.heads, self.slots = mask, heads, slots
        self._known: tuple[int, int, torch.device] | None = None
        self._rows: list[Tensor] = []

    def __call__(self, ring: RingCache, at: int) -> Bool[Tensor, "1 h 1 n"]:
        """What the token at position `at`, whose own key is in the ring, sees of it; h is 1 where heads agree."""
        # keys that stay are the first so many that do, so their number tells them
        name = (at // STRETCH, ring.position_ids.shape[1], ring.position_ids.device)
        if name != self._known:
            self._rows = list(torch.split(self._look(ring, name[0] * STRETCH), 1, dim=2))
            self._known = name
        return self._rows[at % STRETCH]

    def _look(self, ring: RingCache, begin: int) -> Bool[Tensor, "1 h stretch n"]:
        device = ring.position_ids.device
        query = torch.arange(begin, begin + STRETCH, device=device)[None, None, :, None]
        slot = torch.arange(self.slots, device=device)
        # the last position that belongs there, unless it was kept elsewhere
        inside = query - (query - slot) % self.slots
        there = (inside >= 0) & ~never_evicted(self.mask, inside)
        kept = ring.position_ids[:1, None, None, self.slots :].expand(1, 1, STRETCH, -1)
        pos, real = torch.cat([inside, kept], -1), torch.cat([there, torch.ones_like(kept, dtype=torch.bool)], -1)
        at, of = TokenPositions(query, torch.zeros_like(query)), TokenPositions(pos, torch.zeros_like(pos))
        kinds = [self.mask.for_head(head) for head in range(self.heads)] if self.mask.per_head else [self.mask]
        numbers = torch.arange(len(kinds), device=device)
        shown = [kind(number, at, of).expand(pos.shape) & real for kind, number in zip(kinds, numbers)]
        return torch.cat(shown, 1)
