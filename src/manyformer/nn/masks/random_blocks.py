"""Random block masks, drawn once from a seed (Zaheer et al. 2020, arXiv:2007.14062, section 2)."""

import random
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple, final

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from manyformer.nn.core import TokenPositions
from manyformer.nn.masks.mask import Mask, TokenBounds, VisibilityBounds, pair_shape
from manyformer.nn.runtime.device_reads import ConstantTensor, is_readable, keep_values, kept_tensor
from manyformer.nn.runtime.torch_internals import constant_for_compiler, is_traced

MAX_QUERY_BLOCKS = 8
"""Bounds are exact for query sets of at most this many blocks; for wider ones any key may be visible."""

MAX_KEPT_TABLES = 1024
"""Random tables of heads that are kept."""

BlockRows = tuple[tuple[int, ...], ...]
"""The visible key blocks of each query block."""


class BlockTable(NamedTuple):
    """Query block i of `size` positions sees the key blocks of row i; blocks beyond the table see no key.

    `targets` are the rows, transposed, because `shows` compares one target of each row at a time; -1 is no block."""

    size: int
    num_rows: int
    targets: Int[Tensor, "row_width n"]

    def shows(self, q: TokenPositions, k: TokenPositions) -> Bool[Tensor, "..."]:
        """Whether the block of each key is one that the query's block sees."""
        query_block = q.position_ids // self.size
        key_block = k.position_ids // self.size
        # one comparison for each of the few targets of a row: a table of all pairs of blocks would be quadratic
        visible = torch.zeros((), dtype=torch.bool, device=query_block.device)
        row = query_block.clamp(max=self.num_rows - 1)
        for targets in self.targets.unbind(0):
            visible = visible | (targets[row] == key_block)
        return visible & (query_block < self.num_rows)

    def bounds(self, q: TokenBounds, k: TokenBounds) -> VisibilityBounds:
        """The bounds of what it shows."""
        q_low, q_high, k_low, k_high = (bound // self.size for bound in (q.first, q.last, k.first, k.last))
        # sets that span many blocks are not looked through: any key may be visible to them
        is_wide = q_high - q_low >= MAX_QUERY_BLOCKS
        steps = MAX_QUERY_BLOCKS
        # fewer steps, where reading their number does not make a device wait or end a graph
        if is_readable(q_low):
            steps = 1
            if q_low.numel():
                steps = int((q_high - q_low).masked_fill(is_wide, 0).amax()) + 1
        # two leading axes: the blocks of the queries, and the key blocks that each of them sees
        row = q_low + torch.arange(steps, device=q_low.device).view(-1, *[1] * len(pair_shape(q, k)))
        target = self.targets[:, row.clamp(max=self.num_rows - 1)]
        hits = (row <= q_high) & (row < self.num_rows) & (k_low <= target) & (target <= k_high)
        any_hit = hits.any(0).any(0)
        return VisibilityBounds(any_hit | is_wide, any_hit & (q_low == q_high) & (k_low == k_high))


@final
@dataclass(frozen=True)
class ListedBlocks(Mask):
    """Query block i of `size` positions sees the key blocks in `rows[i]`; blocks beyond the list see no key."""

    size: int
    rows: BlockRows
    columns: ConstantTensor = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.size < 1 or not self.rows:
            raise ValueError(f"ListedBlocks: size ({self.size}) must be at least 1, and rows must not be empty")
        object.__setattr__(self, "columns", ConstantTensor(_transposed(self.rows), torch.long))

    def __call__(self, h: Tensor, q: TokenPositions, k: TokenPositions) -> Bool[Tensor, "..."]:
        return self._table(q.position_ids.device).shows(q, k)

    def bounds(self, q: TokenBounds, k: TokenBounds) -> VisibilityBounds:
        return self._table(q.first.device).bounds(q, k)

    @property
    def causal(self) -> bool:
        return all(target < row for row, targets in enumerate(self.rows) for target in targets)

    def _table(self, device: torch.device) -> BlockTable:
        return BlockTable(self.size, len(self.rows), self.columns.on(device))


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
    reads_head = True
    uniform_over_heads = True

    def __post_init__(self) -> None:
        counts = self.count, self.local_blocks, self.skip_first, self.skip_last
        if min(self.size, self.num_blocks) < 1 or min(counts) < 0:
            raise ValueError(f"{self!r}: size and num_blocks must be at least 1, other counts at least 0")

    def __call__(self, h: Tensor, q: TokenPositions, k: TokenPositions) -> Bool[Tensor, "..."]:
        visible = torch.zeros((), dtype=torch.bool, device=q.position_ids.device)
        for head in range(int(h.max()) + 1 if h.numel() else 1):
            visible = torch.where(h == head, self.in_head(head, q, k), visible)
        return visible

    def in_head(self, head: int, q: TokenPositions, k: TokenPositions) -> Bool[Tensor, "..."]:
        return self._table(head, q.position_ids.device).shows(q, k)

    def bounds_in_head(self, head: int, q: TokenBounds, k: TokenBounds) -> VisibilityBounds:
        return self._table(head, q.first.device).bounds(q, k)

    @property
    def causal(self) -> bool:
        return self.past_only

    def for_head(self, head: int) -> Mask:
        return DrawnBlocks(self, head)

    def _table(self, head: int, device: torch.device) -> BlockTable:
        limits = self.local_blocks, self.skip_first, self.skip_last, self.past_only
        parameters = self.size, self.count, self.num_blocks, self.seed, *limits
        # a graph that is recorded, or tensors without numbers, have tables of their own
        if is_traced() and not torch.compiler.is_dynamo_compiling():
            targets = torch.tensor(_drawn_columns(head, self), dtype=torch.long, device=device)
            return BlockTable(self.size, self.num_blocks, targets)
        # a graph of a compiler holds the name of a table, not its values
        name = f"random_{head}_{'_'.join(map(str, parameters))}".replace("-", "minus")
        _keep_drawn(name, device, head, *parameters)
        return BlockTable(self.size, self.num_blocks, kept_tensor(name, device))


@final
@dataclass(frozen=True)
class DrawnBlocks(Mask):
    """The random blocks of one head."""

    drawn: RandomBlocks
    head: int

    def __call__(self, h: Tensor, q: TokenPositions, k: TokenPositions) -> Bool[Tensor, "..."]:
        return self.drawn.in_head(self.head, q, k)

    def bounds(self, q: TokenBounds, k: TokenBounds) -> VisibilityBounds:
        return self.drawn.bounds_in_head(self.head, q, k)

    @property
    def rows(self) -> BlockRows:
        """The key blocks of each block."""
        return _draw_rows(self.head, self.drawn)

    @property
    def causal(self) -> bool:
        return self.drawn.past_only


@constant_for_compiler
def _keep_drawn(name: str, device: torch.device, head: int, *parameters: Any) -> Tensor:
    """Keep the table of one head of `RandomBlocks(*parameters)`, all of them numbers, which a compiler knows."""
    return keep_values(name, _drawn_columns(head, RandomBlocks(*parameters)), torch.long, device)


@lru_cache(maxsize=MAX_KEPT_TABLES)
def _drawn_columns(head: int, mask: RandomBlocks) -> BlockRows:
    return _transposed(_draw_rows(head, mask))


@lru_cache(maxsize=MAX_KEPT_TABLES)
def _draw_rows(head: int, mask: RandomBlocks) -> BlockRows:
    rows = []
    for row in range(mask.num_blocks):
        # a generator for each row, so that a longer list begins with the rows of a shorter one
        generator = random.Random(f"{mask.seed} {head} {row}")
        if mask.past_only:
            stop = row - mask.local_blocks
        else:
            stop = mask.num_blocks - mask.skip_last
        candidates = [block for block in range(mask.skip_first, stop) if abs(block - row) > mask.local_blocks]
        rows.append(tuple(sorted(generator.sample(candidates, min(mask.count, len(candidates))))))
    return tuple(rows)


def _transposed(rows: BlockRows) -> BlockRows:
    """The rows as columns, those that are shorter than others filled with -1, which no block has as its index."""
    row_width = max(1, *(len(row) for row in rows))
    return tuple(zip(*((*row, *[-1] * (row_width - len(row))) for row in rows)))
