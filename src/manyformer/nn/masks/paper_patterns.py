"""Sparse attention patterns of papers as mask expressions, and masks that differ between heads or layers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Bool
from torch import Tensor

from manyformer.nn.core import TokenPositions
from manyformer.nn.masks.local import Causal, LocalBlocks, Stride, Window
from manyformer.nn.masks.mask import (
    AllKeys,
    Mask,
    NoKeys,
    NotMask,
    TokenBounds,
    VisibilityBounds,
    simplify_and,
    widest_lookback,
)
from manyformer.nn.masks.token_sets import AttendsToAll, PeriodicTokens, TokenSet, VisibleToAll


@final
@dataclass(frozen=True, init=False)
class PerHead(Mask):
    """A mask per head index, and a default for the remaining heads: `PerHead({0: Causal()}, default=NoKeys())`."""

    masks: tuple[tuple[int, Mask], ...]
    default: Mask
    per_head = True

    def __init__(self, masks: Mapping[int, Mask], *, default: Mask | None = None) -> None:
        for head in masks:
            if head < 0:
                raise ValueError(f"PerHead: head {head} does not exist; heads are numbered from 0")
        # sorted, so that equal masks compare equal whatever the order of their heads
        object.__setattr__(self, "masks", tuple(sorted(masks.items())))
        object.__setattr__(self, "default", NoKeys() if default is None else default)

    def __call__(self, h: Tensor, q: TokenPositions, k: TokenPositions) -> Bool[Tensor, "..."]:
        visible = self.default(h, q, k)
        for head, mask in self.masks:
            visible = torch.where(h == head, mask(h, q, k), visible)
        return visible

    def bounds(self, q: TokenBounds, k: TokenBounds) -> VisibilityBounds:
        """Bounds that hold in every head."""
        any_visible, all_visible = self.default.bounds(q, k)
        for _, mask in self.masks:
            head_bounds = mask.bounds(q, k)
            any_visible = any_visible | head_bounds.any_visible
            all_visible = all_visible & head_bounds.all_visible
        return VisibilityBounds(any_visible, all_visible)

    def in_head(self, head: int, q: TokenPositions, k: TokenPositions) -> Bool[Tensor, "..."]:
        return self._mask_of(head).in_head(head, q, k)

    def bounds_in_head(self, head: int, q: TokenBounds, k: TokenBounds) -> VisibilityBounds:
        return self._mask_of(head).bounds_in_head(head, q, k)

    @property
    def reads_head(self) -> bool:
        return any(mask.reads_head for mask in self._all_masks())

    @property
    def causal(self) -> bool:
        return all(mask.causal for mask in self._all_masks())

    @property
    def max_lookback(self) -> int | None:
        return widest_lookback(*self._all_masks())

    @property
    def periods(self) -> frozenset[int]:
        return frozenset().union(*(mask.periods for mask in self._all_masks()))

    def for_head(self, head: int) -> Mask:
        return self._mask_of(head).for_head(head)

    def __repr__(self) -> str:
        head_masks = ", ".join(f"{head}: {mask!r}" for head, mask in self.masks)
        return f"PerHead({{{head_masks}}}, default={self.default!r})"

    def _mask_of(self, head: int) -> Mask:
        return dict(self.masks).get(head, self.default)

    def _all_masks(self) -> tuple[Mask, ...]:
        return (*(mask for _, mask in self.masks), self.default)


MaskByLayer = Callable[[int], Mask]
"""A function from the layer index, counted from 0 at the bottom, to the layer's mask."""


def symmetric_window(radius: int, *, dilation: int = 1) -> Window:
    """A window of `radius` positions on either side."""
    return Window(radius + 1, lookahead=radius, dilation=dilation)


def prefix_lm(tokens: TokenSet) -> Mask:
    """A causal mask in which all queries see the prefix (Liu et al. 2018, arXiv:1801.10198; Raffel et al. 2020)."""
    return Causal() | VisibleToAll(tokens)


def strided_pattern(stride: int) -> tuple[Mask, Mask]:
    """The last `stride` positions, and every `stride`-th position (Child et al. 2019, arXiv:1904.10509, section 4.2).

    The window is that of the released code, one narrower than the paper's; the union of both masks is the same.
    """
    return Window(stride), simplify_and(Causal(), Stride(stride))


def fixed_pattern(stride: int, summary: int, *, part_index: int = 0) -> tuple[Mask, Mask]:
    """The query's block, and the last `summary` positions of each block (Child et al. 2019, section 4.2).

    Heads may use different parts of a block: `part_index` counts parts of `summary` positions from its end.
    """
    if not 0 < summary * (part_index + 1) <= stride:
        raise ValueError(
            f"fixed_pattern: {summary} summary positions, part {part_index} from the end, exceed a block of {stride}"
        )
    stop = stride - part_index * summary
    return simplify_and(Causal(), LocalBlocks(stride)), simplify_and(
        Causal(), VisibleToAll(PeriodicTokens(stride, stop - summary, stop))
    )


def four_piece_pattern(
    tokens: TokenSet, *, g2g: Mask | None = None, g2l: Mask | None = None, l2g: Mask | None = None, l2l: Mask
) -> Mask:
    """A mask of four pieces, between global `tokens` and all others (Ainslie et al. 2020, arXiv:2004.08483).

    `g2l` is for global queries and local keys, and so on; None allows all pairs of that piece.
    """
    from_global = AttendsToAll(tokens)
    to_global = VisibleToAll(tokens)
    pieces = (
        (from_global, to_global, g2g),
        (from_global, NotMask(to_global), g2l),
        (NotMask(from_global), to_global, l2g),
        (NotMask(from_global), NotMask(to_global), l2l),
    )
    masks = [simplify_and(simplify_and(start, end), AllKeys() if mask is None else mask) for start, end, mask in pieces]
    return masks[3] | masks[2] | masks[1] | masks[0]


def alternate_heads(masks: Sequence[Mask], heads: int) -> Mask:
    """The patterns assigned to the heads cyclically (Child et al. 2019, section 4.3, per head)."""
    return PerHead({head: masks[head % len(masks)] for head in range(heads)})


def alternate_layers(masks: Sequence[Mask]) -> MaskByLayer:
    """The patterns assigned to the layers cyclically (Child et al. 2019, section 4.3)."""
    return lambda layer: masks[layer % len(masks)]


def growing_windows(depth: int, bottom: int, top: int) -> Callable[[int], int]:
    """Window sizes that grow geometrically from the bottom layer to the top one (Beltagy et al. 2020, section 4.1)."""
    if min(depth, bottom, top) < 1:
        raise ValueError(f"growing_windows: depth ({depth}), bottom ({bottom}) and top ({top}) must be at least 1")
    return lambda layer: round(bottom * (top / bottom) ** (layer / max(depth - 1, 1)))
