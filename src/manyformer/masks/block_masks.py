"""Masks of whole blocks of positions: the own block, permuted blocks, blocks with what lies before them."""

from dataclasses import dataclass, replace
from typing import final

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from manyformer.core import TokenPositions
from manyformer.masks.bounds import TokenBounds, VisibilityBounds
from manyformer.masks.local import Causal
from manyformer.masks.mask import Mask, simplify_and


@final
@dataclass(frozen=True)
class LocalBlocks(Mask):
    """The own block of `size` positions, with `lookback` positions before it and `lookahead` positions after it.

    With `lookback` and the past only it is the local attention of Parmar et al. (2018, arXiv:1802.05751, section 3.3,
    "1D local attention"); alone it is the block diagonal.
    """

    size: int
    lookback: int = 0
    lookahead: int = 0

    def __post_init__(self) -> None:
        if self.size < 1 or self.lookback < 0 or self.lookahead < 0:
            raise ValueError(f"{self!r}: size must be at least 1, before and after at least 0")

    def __call__(self, h: Tensor, q: TokenPositions, k: TokenPositions) -> Bool[Tensor, "..."]:
        begin = q.position_ids // self.size * self.size
        return (k.position_ids >= begin - self.lookback) & (k.position_ids < begin + self.size + self.lookahead)

    def bounds(self, q: TokenBounds, k: TokenBounds) -> VisibilityBounds:
        low, high = (bound // self.size * self.size for bound in (q.first, q.last))
        may = (k.last >= low - self.lookback) & (k.first < high + self.size + self.lookahead)
        return VisibilityBounds(may, (k.first >= high - self.lookback) & (k.last < low + self.size + self.lookahead))

    @property
    def max_lookback(self) -> int | None:
        return self.lookback + self.size - 1

    def __repr__(self) -> str:
        more = f", before={self.lookback}" if self.lookback else ""
        return f"Blocks({self.size}{more}{f', after={self.lookahead}' if self.lookahead else ''})"


@final
@dataclass(frozen=True, init=False)
class PermutedBlocks(Mask):
    """Block i of `size` positions sees block order[i] (Qiu et al. 2020, arXiv:1911.02972, section 3.1).

    `PermutedBlocks(128, 1, 2, 0)` shifts three blocks by one. There are no blocks beyond those listed.
    """

    size: int
    order: tuple[int, ...]

    def __init__(self, size: int, *order: int) -> None:
        if size < 1 or sorted(order) != list(range(len(order))) or not order:
            raise ValueError(f"PermutedBlocks: {order} must name each of its blocks once, of size ({size}) at least 1")
        object.__setattr__(self, "size", size)
        object.__setattr__(self, "order", order)

    def __call__(self, h: Tensor, q: TokenPositions, k: TokenPositions) -> Bool[Tensor, "..."]:
        row = q.position_ids // self.size
        target = torch.tensor(self.order, device=q.position_ids.device)[row.clamp(max=len(self.order) - 1)]
        return (k.position_ids // self.size == target) & (row < len(self.order))

    def bounds(self, q: TokenBounds, k: TokenBounds) -> VisibilityBounds:
        (low, high), (first, last) = ((span.first // self.size, span.last // self.size) for span in (q, k))
        may, must = torch.zeros_like(low + first, dtype=torch.bool), torch.zeros_like(low + first, dtype=torch.bool)
        for row, target in enumerate(self.order):
            may = may | ((low <= row) & (row <= high) & (first <= target) & (target <= last))
            must = must | ((low == row) & (high == row) & (first == target) & (last == target))
        return VisibilityBounds(may, must)

    def __repr__(self) -> str:
        return f"Permuted({', '.join(map(str, (self.size, *self.order)))})"


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

    def __post_init__(self) -> None:
        if min(self.width, self.rows, self.columns) < 1 or min(self.above, self.margin) < 0:
            raise ValueError(f"{self!r}: sizes must be at least 1, above and beside at least 0")
        if self.width % self.columns:
            raise ValueError(f"{self!r}: width ({self.width}) must be a multiple of columns ({self.columns})")

    def __call__(self, h: Tensor, q: TokenPositions, k: TokenPositions) -> Bool[Tensor, "..."]:
        row, column = self.pixel(k.position_ids)
        top, left = self.corner(q.position_ids)
        area = self.rows * self.columns
        own = (q.position_ids // area == k.position_ids // area) & (k.position_ids <= q.position_ids)
        near = (column >= left - self.margin) & (column < left + self.columns + self.margin)
        over = near & (row >= top - self.above) & (row < top)
        aside = (row >= top) & (row < top + self.rows) & (column >= left - self.margin) & (column < left)
        return own | over | aside

    def bounds(self, q: TokenBounds, k: TokenBounds) -> VisibilityBounds:
        q_top, q_bottom, q_left, q_right = self.area(q)
        k_top, k_bottom, k_left, k_right = self.area(k)
        near = (k_right >= q_left - self.margin) & (k_left <= q_right + self.margin)
        may = near & (k_bottom >= q_top - self.above) & (k_top <= q_bottom) & (k.first <= q.last)
        # queries of several strips are not known by their columns
        may = may & (q.first - k.last <= self.max_lookback)
        return VisibilityBounds(may, torch.zeros_like(may))

    @property
    def causal(self) -> bool:
        return True

    def disjuncts(self) -> tuple[Mask, ...]:
        # few rows of a block are seen from below: by themselves they lie close together
        own = simplify_and(Causal(), LocalBlocks(self.rows * self.columns))
        aside = (replace(self, above=0),) if self.margin else ()
        return (own, *aside, RowsAbove2D(self)) if self.above else (own, *aside)

    @property
    def max_lookback(self) -> int:
        # from the last pixel of a block to the first one of the outermost block that it sees: above and to the left
        across, strips, left = self.width // self.columns, -(-self.above // self.rows), -(-self.margin // self.columns)
        back = strips * across + min(left, across - 1)
        return (back + 1) * self.rows * self.columns - 1

    def corner(self, pos: Int[Tensor, "..."]) -> tuple[Tensor, Tensor]:
        """The top row and the left column of the block of each pixel."""
        block, across = pos // (self.rows * self.columns), self.width // self.columns
        return block // across * self.rows, block % across * self.columns

    def pixel(self, pos: Int[Tensor, "..."]) -> tuple[Tensor, Tensor]:
        """The row and column of each pixel."""
        (top, left), inside = self.corner(pos), pos % (self.rows * self.columns)
        return top + inside // self.columns, left + inside % self.columns

    def area(self, span: TokenBounds) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Bounds of rows and columns: of the whole width where the pixels lie in more than one strip of blocks."""
        (top, left), (bottom, right) = self.corner(span.first), self.corner(span.last)
        strip = top == bottom
        last = torch.where(strip, right + self.columns - 1, self.width - 1)
        return top, bottom + self.rows - 1, torch.where(strip, left, 0), last


@final
@dataclass(frozen=True)
class RowsAbove2D(Mask):
    """Of two-dimensional local attention, what a pixel sees above the blocks beside its own."""

    image: Local2D

    def __call__(self, h: Tensor, q: TokenPositions, k: TokenPositions) -> Bool[Tensor, "..."]:
        image = self.image
        row, column = image.pixel(k.position_ids)
        top, left = image.corner(q.position_ids)
        near = (column >= left - image.margin) & (column < left + image.columns + image.margin)
        return near & (row >= top - image.above) & (row < top)

    def bounds(self, q: TokenBounds, k: TokenBounds) -> VisibilityBounds:
        image = self.image
        q_top, q_bottom, q_left, q_right = image.area(q)
        k_top, k_bottom, k_left, k_right = image.area(k)
        near = (k_right >= q_left - image.margin) & (k_left <= q_right + image.margin)
        above = (k_bottom >= q_top - image.above) & (k_top <= q_bottom - image.rows)
        # of every block only the lowest rows are seen
        size = image.rows * image.columns
        lowest = torch.where(k.first // size == k.last // size, k.last % size // image.columns, image.rows - 1)
        may = near & above & (lowest >= image.rows - image.above)
        return VisibilityBounds(may, torch.zeros_like(may))

    @property
    def causal(self) -> bool:
        return True

    @property
    def max_lookback(self) -> int | None:
        return self.image.max_lookback
