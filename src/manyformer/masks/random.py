"""Random blocks: the same for every batch, by their seed (Zaheer et al. 2020, arXiv:2007.14062, section 2)."""

import random
from dataclasses import dataclass
from functools import cache
from typing import final

import torch
from jaxtyping import Bool
from torch import Tensor

from manyformer.core import Place
from manyformer.masks.base import Mask
from manyformer.masks.spans import Bounds, Span, pairs_of

WIDE = 8
"""Bounds look into sets of at most this many blocks; of wider ones they know nothing."""

Rows = tuple[tuple[int, ...], ...]


@final
@dataclass(frozen=True)
class Listed(Mask):
    """Query block i of `size` positions sees the key blocks in `rows[i]`; blocks beyond the list see nothing."""

    size: int
    rows: Rows

    def __post_init__(self) -> None:
        if self.size < 1 or not self.rows:
            raise ValueError(f"Listed: the size of a block ({self.size}) must be at least 1, and a row be listed")

    def __call__(self, h: Tensor, q: Place, k: Place) -> Bool[Tensor, "..."]:
        return _seen(_table((self.rows,)).to(q.pos.device), torch.zeros_like(h), q.pos // self.size, k.pos // self.size)

    def bounds(self, q: Span, k: Span) -> Bounds:
        table = _table((self.rows,))[0]
        low, high, first, last = (bound // self.size for bound in (q.first, q.last, k.first, k.last))
        narrow = high - low < WIDE
        may, must = (~narrow).expand(pairs_of(q, k)), torch.zeros(pairs_of(q, k), dtype=torch.bool)
        for step in range(WIDE):
            row = low + step
            for target in table[row.clamp(max=len(table) - 1)].unbind(-1):
                hit = (row <= high) & (row < len(table)) & (first <= target) & (target <= last)
                may = may | hit
                must = must | (hit & (low == high) & (first == last))
        return Bounds(may, must)

    @property
    def causal(self) -> bool:
        return all(target < row for row, targets in enumerate(self.rows) for target in targets)


@final
@dataclass(frozen=True)
class RandomBlocks(Mask):
    """Every block of `size` positions sees `count` random other ones, each head its own, the same for every batch.

    `blocks` is the number of blocks there are; later ones see no random block. `near` blocks on either side and the
    own block, the first `lead` and the last `tail` blocks are left out, because other parts of a pattern show them.
    With `past` a block sees only earlier ones, so that nothing of the future is seen; the released causal models do
    not do this. Early blocks then see as many as there are.
    """

    size: int
    count: int
    blocks: int
    seed: int = 0
    near: int = 1
    lead: int = 0
    tail: int = 0
    past: bool = False

    def __post_init__(self) -> None:
        if min(self.size, self.blocks) < 1 or min(self.count, self.near, self.lead, self.tail) < 0:
            raise ValueError(f"{self!r}: sizes must be at least 1, numbers of blocks at least 0")

    def __call__(self, h: Tensor, q: Place, k: Place) -> Bool[Tensor, "..."]:
        heads = int(h.max()) + 1 if h.numel() else 1
        table = _table(tuple(_draw(self, head) for head in range(heads))).to(q.pos.device)
        return _seen(table, h, q.pos // self.size, k.pos // self.size)

    @property
    def per_head(self) -> bool:
        return True

    @property
    def causal(self) -> bool:
        return self.past

    def head(self, number: int) -> Mask:
        return Listed(self.size, _draw(self, number))


def _seen(table: Tensor, h: Tensor, row: Tensor, column: Tensor) -> Bool[Tensor, "..."]:
    found = torch.zeros((), dtype=torch.bool, device=row.device)
    targets = table[h, row.clamp(max=table.shape[1] - 1)]
    for target in targets.unbind(-1):
        found = found | (target == column)
    return found & (row < table.shape[1])


@cache
def _draw(mask: RandomBlocks, head: int) -> Rows:
    """The random blocks of one head."""
    rows = []
    for row in range(mask.blocks):
        # a generator for each row, so that a longer list begins like a shorter one
        generator = random.Random(f"{mask.seed} {head} {row}")
        end = row - mask.near if mask.past else mask.blocks - mask.tail
        allowed = [block for block in range(mask.lead, end) if abs(block - row) > mask.near]
        rows.append(tuple(sorted(generator.sample(allowed, min(mask.count, len(allowed))))))
    return tuple(rows)


@cache
def _table(heads: tuple[Rows, ...]) -> Tensor:
    """The lists of all heads as one tensor (h, rows, most), filled up with -1."""
    most = max(1, *(len(targets) for rows in heads for targets in rows))
    filled = [[[*targets, *[-1] * (most - len(targets))] for targets in rows] for rows in heads]
    return torch.tensor(filled, dtype=torch.long)
