"""Random block masks, drawn once from a seed (Zaheer et al. 2020, arXiv:2007.14062, section 2)."""

import random
from abc import abstractmethod
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, final

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from manyformer.constant_tensors import constant_tensor
from manyformer.core import TokenPositions
from manyformer.device_reads import is_readable
from manyformer.masks.bounds import TokenBounds, VisibilityBounds, pair_shape
from manyformer.masks.mask import Mask
from manyformer.torch_internals import constant_for_compiler

MAX_QUERY_BLOCKS = 8
"""Bounds are exact for query sets of at most this many blocks; for wider ones any key may be visible."""

MAX_KEPT_TABLES = 1024
"""Random tables of heads that are kept, on each device."""

BlockRows = tuple[tuple[int, ...], ...]
"""The visible key blocks of each query block."""


class BlockTable(Mask):
    """Query block i of `size` positions sees the key blocks of row i of a table; blocks beyond the table see no key."""

    size: int

    @property
    @abstractmethod
    def num_rows(self) -> int:
        """The number of rows of the table."""

    @abstractmethod
    def targets(self, device: torch.device) -> Int[Tensor, "row_width n"]:
        """The table, transposed, because `__call__` compares one target of each row at a time; -1 is no block."""

    def __call__(self, h: Tensor, q: TokenPositions, k: TokenPositions) -> Bool[Tensor, "..."]:
        device, row_count = q.position_ids.device, self.num_rows
        query_block, key_block = q.position_ids // self.size, k.position_ids // self.size
        has_row, visible = query_block < row_count, torch.zeros((), dtype=torch.bool, device=device)
        query_block = query_block.clamp(max=row_count - 1)
        for targets in self.targets(device).unbind(0):
            visible = visible | (targets[query_block] == key_block)
        return visible & has_row

    def bounds(self, q: TokenBounds, k: TokenBounds) -> VisibilityBounds:
        q_low, q_high, k_low, k_high = (bound // self.size for bound in (q.first, q.last, k.first, k.last))
        is_wide = q_high - q_low >= MAX_QUERY_BLOCKS
        steps = MAX_QUERY_BLOCKS
        # fewer steps, where reading their number does not make a device wait or end a graph
        if is_readable(q_low):
            steps = int((q_high - q_low).masked_fill(is_wide, 0).amax()) + 1 if q_low.numel() else 1
        # two leading axes: the blocks of the queries, and the key blocks that each of them sees
        row = q_low + torch.arange(steps, device=q_low.device).view(-1, *[1] * len(pair_shape(q, k)))
        target = self.targets(q_low.device)[:, row.clamp(max=self.num_rows - 1)]
        hits = (row <= q_high) & (row < self.num_rows) & (k_low <= target) & (target <= k_high)
        any_hit = hits.any(0).any(0)
        return VisibilityBounds(any_hit | is_wide, any_hit & (q_low == q_high) & (k_low == k_high))


@final
@dataclass(frozen=True)
class ListedBlocks(BlockTable):
    """Query block i of `size` positions sees the key blocks in `rows[i]`; blocks beyond the list see no key."""

    size: int
    rows: BlockRows
    table: BlockRows = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.size < 1 or not self.rows:
            raise ValueError(f"ListedBlocks: size ({self.size}) must be at least 1, and rows must not be empty")
        object.__setattr__(self, "table", _transposed(self.rows))

    @property
    def num_rows(self) -> int:
        return len(self.rows)

    def targets(self, device: torch.device) -> Int[Tensor, "row_width n"]:
        return constant_tensor(self.table, torch.long, device)

    @property
    def causal(self) -> bool:
        return all(target < row for row, targets in enumerate(self.rows) for target in targets)


@final
@dataclass(frozen=True)
class RandomBlocks(Mask):
    """Every block of `size` positions sees `count` random other blocks, different per head, the same for every batch.

    `num_blocks` is the number of blocks; later ones see no random block. The query's block, `local_blocks` blocks on
    either side, the first `skip_first` and the last `skip_last` blocks are not drawn, because other parts of a pattern
    make them visible. With `past_only` a block sees only earlier blocks, so that the mask is causal; the released
    causal models do not do this. Early blocks then see all candidates, if these are fewer than `count`."""

    size: int
    count: int
    num_blocks: int
    seed: int = 0
    local_blocks: int = 1
    skip_first: int = 0
    skip_last: int = 0
    past_only: bool = False
    per_head = True
    uniform_over_heads = True

    def __post_init__(self) -> None:
        counts = self.count, self.local_blocks, self.skip_first, self.skip_last
        if min(self.size, self.num_blocks) < 1 or min(counts) < 0:
            raise ValueError(f"{self!r}: size and num_blocks must be at least 1, other counts at least 0")

    def __call__(self, h: Tensor, q: TokenPositions, k: TokenPositions) -> Bool[Tensor, "..."]:
        visible = torch.zeros((), dtype=torch.bool, device=q.position_ids.device)
        for head in range(int(h.max()) + 1 if h.numel() else 1):
            visible = torch.where(h == head, self.for_head(head)(h, q, k), visible)
        return visible

    @property
    def causal(self) -> bool:
        return self.past_only

    def for_head(self, head: int) -> Mask:
        return DrawnBlocks(self, head)


@final
@dataclass(frozen=True)
class DrawnBlocks(BlockTable):
    """The random blocks of one head."""

    drawn: RandomBlocks
    head: int
    size: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", self.drawn.size)

    @property
    def rows(self) -> BlockRows:
        """The key blocks of each block."""
        return _draw_rows(self.head, self.drawn)

    @property
    def num_rows(self) -> int:
        return self.drawn.num_blocks

    def targets(self, device: torch.device) -> Int[Tensor, "row_width n"]:
        mask = self.drawn
        limits = mask.local_blocks, mask.skip_first, mask.skip_last, mask.past_only
        return _drawn_targets(device, self.head, mask.size, mask.count, mask.num_blocks, mask.seed, *limits)

    @property
    def causal(self) -> bool:
        return self.drawn.past_only


@constant_for_compiler
def _drawn_targets(device: torch.device, head: int, *parameters: Any) -> Int[Tensor, "row_width n"]:
    """The table of one head of `RandomBlocks(*parameters)`, all of them numbers, which a compiler knows."""
    return _kept_targets(device, head, RandomBlocks(*parameters))


@lru_cache(maxsize=MAX_KEPT_TABLES)
def _kept_targets(device: torch.device, head: int, mask: RandomBlocks) -> Int[Tensor, "row_width n"]:
    return constant_tensor(_transposed(_draw_rows(head, mask)), torch.long, device)


@lru_cache(maxsize=MAX_KEPT_TABLES)
def _draw_rows(head: int, mask: RandomBlocks) -> BlockRows:
    rows = []
    for row in range(mask.num_blocks):
        # a generator for each row, so that a longer list begins with the rows of a shorter one
        generator = random.Random(f"{mask.seed} {head} {row}")
        stop = row - mask.local_blocks if mask.past_only else mask.num_blocks - mask.skip_last
        candidates = [block for block in range(mask.skip_first, stop) if abs(block - row) > mask.local_blocks]
        rows.append(tuple(sorted(generator.sample(candidates, min(mask.count, len(candidates))))))
    return tuple(rows)


def _transposed(rows: BlockRows) -> BlockRows:
    """The rows as columns, those that are shorter than others filled with -1, which no block has as its index."""
    row_width = max(1, *(len(row) for row in rows))
    return tuple(zip(*((*row, *[-1] * (row_width - len(row))) for row in rows)))
