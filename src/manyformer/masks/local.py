"""Masks that compare query and key: causal, windows, strides, the same document or part."""

from dataclasses import dataclass
from typing import final

from jaxtyping import Bool
from torch import Tensor

from manyformer.core import TokenPositions
from manyformer.masks.bounds import TokenBounds, VisibilityBounds
from manyformer.masks.mask import Mask, part_ids_of


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
