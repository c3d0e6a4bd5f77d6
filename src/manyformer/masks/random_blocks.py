"""Random blocks: the same for every batch, by their seed (Zaheer et al. 2020, arXiv:2007.14062, section 2)."""

import random
from dataclasses import dataclass, field
from functools import cache
from typing import final

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from manyformer.core import TokenPositions
from manyformer.masks.bounds import TokenBounds, VisibilityBounds, pairs_of
from manyformer.masks.mask import Mask

WIDE = 8
"""Bounds look into sets of at most this many blocks; of wider ones they know nothing."""

BlockRows = tuple[tuple[int, ...], ...]


@final
@dataclass(frozen=True)
class ListedBlocks(Mask):
    """Query block i of `size` positions sees the key blocks in `rows[i]`; blocks beyond the list see nothing."""

    size: int
    rows: BlockRows
    # one list of targets for each place in a row, so that no step looks at more than one number a pair
    targets: Int[Tensor, "most n"] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.size < 1 or not self.rows:
            raise ValueError(f"ListedBlocks: the size of a block ({self.size}) must be at least 1, and a row be listed")
        most = max(1, *(len(row) for row in self.rows))
        # no block has the number -1
        filled = [[*row, *[-1] * (most - len(row))] for row in self.rows]
        object.__setattr__(self, "targets", torch.tensor(filled, device="cpu").T.contiguous())

    def __call__(self, h: Tensor, q: TokenPositions, k: TokenPositions) -> Bool[Tensor, "..."]:
        row, column = q.position_ids // self.size, k.position_ids // self.size
        there, found = row < len(self.rows), torch.zeros((), dtype=torch.bool, device=q.position_ids.device)
        row = row.clamp(max=len(self.rows) - 1)
        for targets in self.targets.to(q.position_ids.device).unbind(0):
            found = found | (targets[row] == column)
        return found & there

    def bounds(self, q: TokenBounds, k: TokenBounds) -> VisibilityBounds:
        low, high, first, last = (bound // self.size for bound in (q.first, q.last, k.first, k.last))
        wide = high - low >= WIDE
        most = int((high - low).masked_fill(wide, 0).amax()) + 1 if low.numel() else 1
        # each block of the queries, and each that it sees, on two axes before those of the pairs
        row = low + torch.arange(most, device=low.device).view(-1, *[1] * len(pairs_of(q, k)))
        target = self.targets.to(low.device)[:, row.clamp(max=len(self.rows) - 1)]
        hit = (row <= high) & (row < len(self.rows)) & (first <= target) & (target <= last)
        found = hit.any(0).any(0)
        return VisibilityBounds(found | wide, found & (low == high) & (first == last))

    @property
    def causal(self) -> bool:
        return all(target < row for row, targets in enumerate(self.rows) for target in targets)


@final
@dataclass(frozen=True)
class RandomBlocks(Mask):
    """Every block of `size` positions sees `count` random other ones, each head its own, the same for every batch.

    `blocks` is the number of blocks there are; later ones see no random block. `local_blocks` blocks on either side and
    the own block, the first `skip_first` and the last `skip_last` blocks are left out, because other parts of a pattern
    show them. With `past_only` a block sees only earlier ones, so that nothing of the future is seen; the released
    causal models do not do this. Early blocks then see as many as there are."""

    size: int
    count: int
    blocks: int
    seed: int = 0
    local_blocks: int = 1
    skip_first: int = 0
    skip_last: int = 0
    past_only: bool = False

    def __post_init__(self) -> None:
        if min(self.size, self.blocks) < 1 or min(self.count, self.local_blocks, self.skip_first, self.skip_last) < 0:
            raise ValueError(f"{self!r}: sizes must be at least 1, numbers of blocks at least 0")

    def __call__(self, h: Tensor, q: TokenPositions, k: TokenPositions) -> Bool[Tensor, "..."]:
        found = torch.zeros((), dtype=torch.bool, device=q.position_ids.device)
        for head in range(int(h.max()) + 1 if h.numel() else 1):
            found = torch.where(h == head, self.for_head(head)(h, q, k), found)
        return found

    @property
    def per_head(self) -> bool:
        return True

    @property
    def uniform_over_heads(self) -> bool:
        return True

    @property
    def causal(self) -> bool:
        return self.past_only

    def for_head(self, number: int) -> Mask:
        return _listed(self, number)


@cache
def _listed(mask: RandomBlocks, head: int) -> ListedBlocks:
    """The random blocks of one head."""
    rows = []
    for row in range(mask.blocks):
        # a generator for each row, so that a longer list begins like a shorter one
        generator = random.Random(f"{mask.seed} {head} {row}")
        end = row - mask.local_blocks if mask.past_only else mask.blocks - mask.skip_last
        allowed = [block for block in range(mask.skip_first, end) if abs(block - row) > mask.local_blocks]
        rows.append(tuple(sorted(generator.sample(allowed, min(mask.count, len(allowed))))))
    return ListedBlocks(mask.size, tuple(rows))
