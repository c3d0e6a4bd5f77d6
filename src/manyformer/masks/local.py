"""Masks of distance: the past, windows, strides, the own document."""

from dataclasses import dataclass
from typing import final

from jaxtyping import Bool
from torch import Tensor

from manyformer.core import TokenPositions
from manyformer.masks.bounds import TokenBounds, VisibilityBounds
from manyformer.masks.mask import Mask, part_of


@final
@dataclass(frozen=True)
class Causal(Mask):
    """The past and the present (Vaswani et al. 2017, section 3.2.3)."""

    def __call__(self, h: Tensor, q: TokenPositions, k: TokenPositions) -> Bool[Tensor, "..."]:
        return k.position_ids <= q.position_ids

    def bounds(self, q: TokenBounds, k: TokenBounds) -> VisibilityBounds:
        return VisibilityBounds(k.first <= q.last, k.last <= q.first)

    @property
    def causal(self) -> bool:
        return True

    @property
    def max_lookback(self) -> int | None:
        return 0


@final
@dataclass(frozen=True)
class SameDocument(Mask):
    """The own document. Kernels apply it anyway; written out it can be negated or drawn."""

    def __call__(self, h: Tensor, q: TokenPositions, k: TokenPositions) -> Bool[Tensor, "..."]:
        return q.segment_ids == k.segment_ids

    def bounds(self, q: TokenBounds, k: TokenBounds) -> VisibilityBounds:
        may = (q.seg[0] <= k.seg[1]) & (k.seg[0] <= q.seg[1])
        return VisibilityBounds(may, may & (q.seg[0] == q.seg[1]) & (k.seg[0] == k.seg[1]))

    @property
    def max_lookback(self) -> int | None:
        return 0


@final
@dataclass(frozen=True)
class SamePart(Mask):
    """The own part of the own document, such as a sentence; a token of no part sees none (Ainslie et al. 2020)."""

    def __call__(self, h: Tensor, q: TokenPositions, k: TokenPositions) -> Bool[Tensor, "..."]:
        mine, other = part_of(q), part_of(k)
        return (mine == other) & (mine >= 0)

    def bounds(self, q: TokenBounds, k: TokenBounds) -> VisibilityBounds:
        (low, high), (first, last) = q.part, k.part
        may = (low <= last) & (first <= high) & (high >= 0) & (last >= 0)
        return VisibilityBounds(may, (low == high) & (first == last) & (low == first) & (low >= 0))

    @property
    def max_lookback(self) -> int | None:
        return 0


@final
@dataclass(frozen=True)
class Window(Mask):
    """The last `size` positions, the own one among them, and `ahead` later ones (Beltagy et al. 2020, section 3.1).

    `Window(256)` is causal; `Window(257, ahead=256)` looks 256 to either side. With `dilation` d only every d-th
    position counts, so that the window is d times as wide; the paper's "dilation 0" is 1 here.
    """

    size: int
    ahead: int = 0
    dilation: int = 1

    def __post_init__(self) -> None:
        if self.size < 1 or self.ahead < 0 or self.dilation < 1:
            raise ValueError(f"{self!r}: size and dilation must be at least 1, ahead at least 0")

    def __call__(self, h: Tensor, q: TokenPositions, k: TokenPositions) -> Bool[Tensor, "..."]:
        back = q.position_ids - k.position_ids
        seen = (back <= (self.size - 1) * self.dilation) & (back >= -self.ahead * self.dilation)
        return seen if self.dilation == 1 else seen & (back % self.dilation == 0)

    def bounds(self, q: TokenBounds, k: TokenBounds) -> VisibilityBounds:
        nearest, farthest = q.first - k.last, q.last - k.first
        most, least = (self.size - 1) * self.dilation, -self.ahead * self.dilation
        may, must = (nearest <= most) & (farthest >= least), (farthest <= most) & (nearest >= least)
        if self.dilation == 1:
            return VisibilityBounds(may, must)
        step = Stride(self.dilation).bounds(q, k)
        return VisibilityBounds(may & step.any_visible, must & step.all_visible)

    @property
    def causal(self) -> bool:
        return self.ahead == 0

    @property
    def max_lookback(self) -> int | None:
        return (self.size - 1) * self.dilation

    @property
    def periods(self) -> frozenset[int]:
        return frozenset() if self.dilation == 1 else frozenset({self.dilation})

    def __repr__(self) -> str:
        more = f", ahead={self.ahead}" if self.ahead else ""
        more += f", dilation={self.dilation}" if self.dilation > 1 else ""
        return f"Window({self.size}{more})"


@final
@dataclass(frozen=True)
class Stride(Mask):
    """Every `step`-th position, counted from the own one in both directions (Child et al. 2019, section 4.2)."""

    step: int

    def __post_init__(self) -> None:
        if self.step < 1:
            raise ValueError(f"{self!r}: the step must be at least 1")

    def __call__(self, h: Tensor, q: TokenPositions, k: TokenPositions) -> Bool[Tensor, "..."]:
        return (q.position_ids - k.position_ids) % self.step == 0

    def bounds(self, q: TokenBounds, k: TokenBounds) -> VisibilityBounds:
        (q_low, q_high), (k_low, k_high) = q.rest(self.step), k.rest(self.step)
        may = (q_low <= k_high) & (k_low <= q_high)
        return VisibilityBounds(may, may & (q_low == q_high) & (k_low == k_high))

    @property
    def max_lookback(self) -> int | None:
        return 0

    @property
    def periods(self) -> frozenset[int]:
        return frozenset({self.step})

    def __repr__(self) -> str:
        return f"Stride({self.step})"
