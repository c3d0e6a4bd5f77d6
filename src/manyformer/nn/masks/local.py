"""Masks that compare the positions of query and key: causal, windows, strides, and blocks of texts and images."""

from dataclasses import dataclass, field, replace
from typing import final

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from manyformer.nn.core import TokenPositions
from manyformer.nn.masks.mask import Mask, TokenBounds, VisibilityBounds, part_ids_of, simplify_and
from manyformer.nn.runtime.device_reads import ConstantTensor


@final
@dataclass(frozen=True)
class Causal(Mask):
    """Keys at or before the query's position (Vaswani et al. 2017, section 3.2.3)."""

    causal = True
    max_lookback = 0

    def __call__(self, h: Tensor, q: TokenPositions, k: TokenPositions) -> Bool[Tensor, "..."]:
        return k.position_ids <= q.position_ids

    def bounds(self, q: TokenBounds, k: TokenBounds) -> VisibilityBounds:
        return VisibilityBounds(k.first <= q.last, k.last <= q.first)


@final
@dataclass(frozen=True)
class SameDocument(Mask):
    """Keys of the query's document. Kernels always apply it; as a mask it can be negated or plotted."""

    max_lookback = 0

    def __call__(self, h: Tensor, q: TokenPositions, k: TokenPositions) -> Bool[Tensor, "..."]:
        return q.segment_ids == k.segment_ids

    def bounds(self, q: TokenBounds, k: TokenBounds) -> VisibilityBounds:
        q_low, q_high = q.segments
        k_low, k_high = k.segments
        overlaps = (q_low <= k_high) & (k_low <= q_high)
        return VisibilityBounds(overlaps, overlaps & (q_low == q_high) & (k_low == k_high))


@final
@dataclass(frozen=True)
class SamePart(Mask):
    """Keys of the query's part, such as a sentence; a token of no part sees no key (Ainslie et al. 2020)."""

    max_lookback = 0

    def __call__(self, h: Tensor, q: TokenPositions, k: TokenPositions) -> Bool[Tensor, "..."]:
        query_parts = part_ids_of(q)
        key_parts = part_ids_of(k)
        return (query_parts == key_parts) & (query_parts >= 0)

    def bounds(self, q: TokenBounds, k: TokenBounds) -> VisibilityBounds:
        q_low, q_high = q.parts
        k_low, k_high = k.parts
        # -1 is no part: two tokens without one do not share it
        overlaps = (q_low <= k_high) & (k_low <= q_high) & (q_high >= 0) & (k_high >= 0)
        return VisibilityBounds(overlaps, (q_low == q_high) & (k_low == k_high) & (q_low == k_low) & (q_low >= 0))


@final
@dataclass(frozen=True)
class Window(Mask):
    """The last `size` positions including the query's, and `lookahead` later ones (Beltagy et al. 2020, section 3.1).

    `Window(256)` is causal; `Window(257, lookahead=256)` has 256 positions on either side. With `dilation` d only every
    d-th position counts, so that the window is d times as wide; the paper's "dilation 0" is 1 here.
    """

    size: int
    lookahead: int = 0
    dilation: int = 1

    def __post_init__(self) -> None:
        if self.size < 1 or self.lookahead < 0 or self.dilation < 1:
            raise ValueError(f"{self!r}: size and dilation must be at least 1, lookahead at least 0")

    def __call__(self, h: Tensor, q: TokenPositions, k: TokenPositions) -> Bool[Tensor, "..."]:
        distance = q.position_ids - k.position_ids
        visible = (distance <= (self.size - 1) * self.dilation) & (distance >= -self.lookahead * self.dilation)
        if self.dilation == 1:
            return visible
        return visible & (distance % self.dilation == 0)

    def bounds(self, q: TokenBounds, k: TokenBounds) -> VisibilityBounds:
        min_distance = q.first - k.last
        max_distance = q.last - k.first
        max_visible = (self.size - 1) * self.dilation
        min_visible = -self.lookahead * self.dilation
        any_visible = (min_distance <= max_visible) & (max_distance >= min_visible)
        all_visible = (max_distance <= max_visible) & (min_distance >= min_visible)
        if self.dilation == 1:
            return VisibilityBounds(any_visible, all_visible)
        # positions of a dilated window agree with the query's modulo the dilation
        dilated = Stride(self.dilation).bounds(q, k)
        return VisibilityBounds(any_visible & dilated.any_visible, all_visible & dilated.all_visible)

    @property
    def causal(self) -> bool:
        return self.lookahead == 0

    @property
    def max_lookback(self) -> int | None:
        return (self.size - 1) * self.dilation

    @property
    def periods(self) -> frozenset[int]:
        if self.dilation == 1:
            return frozenset()
        return frozenset({self.dilation})

    def __repr__(self) -> str:
        options = ""
        if self.lookahead:
            options = f", lookahead={self.lookahead}"
        options += f", dilation={self.dilation}" if self.dilation > 1 else ""
        return f"Window({self.size}{options})"


@final
@dataclass(frozen=True)
class Stride(Mask):
    """Every `step`-th position, counted from the query's in both directions (Child et al. 2019, section 4.2)."""

    step: int
    max_lookback = 0

    def __post_init__(self) -> None:
        if self.step < 1:
            raise ValueError(f"{self!r}: the step must be at least 1")

    def __call__(self, h: Tensor, q: TokenPositions, k: TokenPositions) -> Bool[Tensor, "..."]:
        return (q.position_ids - k.position_ids) % self.step == 0

    def bounds(self, q: TokenBounds, k: TokenBounds) -> VisibilityBounds:
        q_low, q_high = q.residue_bounds(self.step)
        k_low, k_high = k.residue_bounds(self.step)
        overlaps = (q_low <= k_high) & (k_low <= q_high)
        return VisibilityBounds(overlaps, overlaps & (q_low == q_high) & (k_low == k_high))

    @property
    def periods(self) -> frozenset[int]:
        return frozenset({self.step})

    def __repr__(self) -> str:
        return f"Stride({self.step})"


@final
@dataclass(frozen=True)
class LocalBlocks(Mask):
    """The query's block of `size` positions, with `lookback` positions before it and `lookahead` positions after it.

    With `lookback` and `Causal()` it is the local attention of Parmar et al. (2018, arXiv:1802.05751, section 3.3,
    "1D local attention"); without either it is block-diagonal.
    """

    size: int
    lookback: int = 0
    lookahead: int = 0

    def __post_init__(self) -> None:
        if self.size < 1 or self.lookback < 0 or self.lookahead < 0:
            raise ValueError(f"{self!r}: size must be at least 1, lookback and lookahead at least 0")

    def __call__(self, h: Tensor, q: TokenPositions, k: TokenPositions) -> Bool[Tensor, "..."]:
        block_start = q.position_ids // self.size * self.size
        first = block_start - self.lookback
        stop = block_start + self.size + self.lookahead
        return (k.position_ids >= first) & (k.position_ids < stop)

    def bounds(self, q: TokenBounds, k: TokenBounds) -> VisibilityBounds:
        first_start, last_start = (bound // self.size * self.size for bound in (q.first, q.last))
        any_visible = (k.last >= first_start - self.lookback) & (k.first < last_start + self.size + self.lookahead)
        all_visible = (k.first >= last_start - self.lookback) & (k.last < first_start + self.size + self.lookahead)
        return VisibilityBounds(any_visible, all_visible)

    @property
    def max_lookback(self) -> int | None:
        return self.lookback + self.size - 1

    def __repr__(self) -> str:
        options = ""
        if self.lookback:
            options = f", lookback={self.lookback}"
        return f"LocalBlocks({self.size}{options}{f', lookahead={self.lookahead}' if self.lookahead else ''})"


@final
@dataclass(frozen=True, init=False)
class PermutedBlocks(Mask):
    """Block i of `size` positions sees block order[i] (Qiu et al. 2020, arXiv:1911.02972, section 3.1).

    `PermutedBlocks(128, 1, 2, 0)` shifts three blocks by one. Positions beyond the listed blocks see no key.
    """

    size: int
    order: tuple[int, ...]
    targets: ConstantTensor = field(init=False, repr=False, compare=False)

    def __init__(self, size: int, *order: int) -> None:
        if size < 1 or sorted(order) != list(range(len(order))) or not order:
            raise ValueError(f"PermutedBlocks: {order} must name each of its blocks once, of size ({size}) at least 1")
        object.__setattr__(self, "size", size)
        object.__setattr__(self, "order", order)
        object.__setattr__(self, "targets", ConstantTensor(order, torch.long))

    def __call__(self, h: Tensor, q: TokenPositions, k: TokenPositions) -> Bool[Tensor, "..."]:
        query_block = q.position_ids // self.size
        key_block = self.targets.on(q.position_ids.device)[query_block.clamp(max=len(self.order) - 1)]
        return (k.position_ids // self.size == key_block) & (query_block < len(self.order))

    def bounds(self, q: TokenBounds, k: TokenBounds) -> VisibilityBounds:
        (q_low, q_high), (k_low, k_high) = ((tokens.first // self.size, tokens.last // self.size) for tokens in (q, k))
        # the order is no interval: each listed pair of blocks is looked for
        any_visible = torch.zeros_like(q_low + k_low, dtype=torch.bool)
        all_visible = torch.zeros_like(any_visible)
        for row, target in enumerate(self.order):
            any_visible = any_visible | ((q_low <= row) & (row <= q_high) & (k_low <= target) & (target <= k_high))
            all_visible = all_visible | ((q_low == row) & (q_high == row) & (k_low == target) & (k_high == target))
        return VisibilityBounds(any_visible, all_visible)

    def __repr__(self) -> str:
        return f"PermutedBlocks({', '.join(map(str, (self.size, *self.order)))})"


@final
@dataclass(frozen=True)
class Local2D(Mask):
    """Two-dimensional local attention over an image that is generated block by block (Parmar et al. 2018, section 3.3).

    Positions count pixels in raster order within a block of `rows` x `columns`, and blocks in raster order within an
    image `width` pixels wide. A pixel sees its block up to itself, `above` rows above the block with `margin` columns
    on either side, and `margin` columns to the left of the block, all of which were generated earlier.
    """

    width: int
    rows: int
    columns: int
    above: int
    margin: int
    causal = True

    def __post_init__(self) -> None:
        if min(self.width, self.rows, self.columns) < 1 or min(self.above, self.margin) < 0:
            raise ValueError(f"{self!r}: sizes must be at least 1, above and margin at least 0")
        if self.width % self.columns:
            raise ValueError(f"{self!r}: width ({self.width}) must be a multiple of columns ({self.columns})")

    def __call__(self, h: Tensor, q: TokenPositions, k: TokenPositions) -> Bool[Tensor, "..."]:
        row, column = self.pixel_coordinates(k.position_ids)
        top, left = self.block_corner(q.position_ids)
        block_size = self.rows * self.columns
        same_block = (q.position_ids // block_size == k.position_ids // block_size) & (k.position_ids <= q.position_ids)
        in_left_margin = (row >= top) & (row < top + self.rows) & (column >= left - self.margin) & (column < left)
        return same_block | self.rows_above(q, k) | in_left_margin

    def bounds(self, q: TokenBounds, k: TokenBounds) -> VisibilityBounds:
        q_top, q_bottom, q_left, q_right = self.block_bounds(q)
        k_top, k_bottom, k_left, k_right = self.block_bounds(k)
        in_columns = (k_right >= q_left - self.margin) & (k_left <= q_right + self.margin)
        any_visible = in_columns & (k_bottom >= q_top - self.above) & (k_top <= q_bottom) & (k.first <= q.last)
        # the columns of queries in several strips of blocks are not bounded
        any_visible = any_visible & (q.first - k.last <= self.max_lookback)
        return VisibilityBounds(any_visible, torch.zeros_like(any_visible))

    def disjuncts(self) -> tuple[Mask, ...]:
        # only the lowest rows of a block are visible from below; as a separate mask they cover few blocks
        same_block = simplify_and(Causal(), LocalBlocks(self.rows * self.columns))
        left_margin = (replace(self, above=0),) if self.margin else ()
        if self.above:
            return (same_block, *left_margin, RowsAbove2D(self))
        return (same_block, *left_margin)

    @property
    def max_lookback(self) -> int:
        # from the last pixel of a block to the first pixel of the farthest visible block, above and to the left
        blocks_per_row = self.width // self.columns
        strips_above = -(-self.above // self.rows)
        blocks_left = -(-self.margin // self.columns)
        farthest_block = strips_above * blocks_per_row + min(blocks_left, blocks_per_row - 1)
        return (farthest_block + 1) * self.rows * self.columns - 1

    def rows_above(self, q: TokenPositions, k: TokenPositions) -> Bool[Tensor, "..."]:
        """Whether each key is in the `above` rows above the query's block, with `margin` columns on either side."""
        row, column = self.pixel_coordinates(k.position_ids)
        top, left = self.block_corner(q.position_ids)
        in_columns = (column >= left - self.margin) & (column < left + self.columns + self.margin)
        return in_columns & (row >= top - self.above) & (row < top)

    def block_corner(self, position_ids: Int[Tensor, "..."]) -> tuple[Tensor, Tensor]:
        """The top row and the left column of the block of each pixel."""
        block_index = position_ids // (self.rows * self.columns)
        blocks_per_row = self.width // self.columns
        return block_index // blocks_per_row * self.rows, block_index % blocks_per_row * self.columns

    def pixel_coordinates(self, position_ids: Int[Tensor, "..."]) -> tuple[Tensor, Tensor]:
        """The row and column of each pixel."""
        top, left = self.block_corner(position_ids)
        within_block = position_ids % (self.rows * self.columns)
        return top + within_block // self.columns, left + within_block % self.columns

    def block_bounds(self, tokens: TokenBounds) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Bounds of rows and columns; columns cover the full width if the pixels lie in several strips of blocks."""
        top, left = self.block_corner(tokens.first)
        bottom, right = self.block_corner(tokens.last)
        one_strip = top == bottom
        right_edge = torch.where(one_strip, right + self.columns - 1, self.width - 1)
        return top, bottom + self.rows - 1, torch.where(one_strip, left, 0), right_edge


@final
@dataclass(frozen=True)
class RowsAbove2D(Mask):
    """The part of `Local2D` above the query's block: the `above` rows with `margin` columns on either side."""

    image: Local2D
    causal = True

    def __call__(self, h: Tensor, q: TokenPositions, k: TokenPositions) -> Bool[Tensor, "..."]:
        return self.image.rows_above(q, k)

    def bounds(self, q: TokenBounds, k: TokenBounds) -> VisibilityBounds:
        image = self.image
        q_top, q_bottom, q_left, q_right = image.block_bounds(q)
        k_top, k_bottom, k_left, k_right = image.block_bounds(k)
        in_columns = (k_right >= q_left - image.margin) & (k_left <= q_right + image.margin)
        in_rows_above = (k_bottom >= q_top - image.above) & (k_top <= q_bottom - image.rows)
        # only the lowest rows of every block are visible
        block_size = image.rows * image.columns
        lowest_row = torch.where(
            k.first // block_size == k.last // block_size, k.last % block_size // image.columns, image.rows - 1
        )
        any_visible = in_columns & in_rows_above & (lowest_row >= image.rows - image.above)
        return VisibilityBounds(any_visible, torch.zeros_like(any_visible))

    @property
    def max_lookback(self) -> int | None:
        return self.image.max_lookback
