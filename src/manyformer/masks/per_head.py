"""Masks that differ from head to head."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Bool
from torch import Tensor

from manyformer.core import TokenPositions
from manyformer.masks.bounds import TokenBounds, VisibilityBounds
from manyformer.masks.mask import Mask, NoKeys, widest_lookback


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
