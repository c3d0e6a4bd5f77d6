"""Masks that differ from head to head."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Bool
from torch import Tensor

from manyformer.core import TokenPositions
from manyformer.masks.bounds import TokenBounds, VisibilityBounds
from manyformer.masks.mask import Mask, NoKeys


@final
@dataclass(frozen=True, init=False)
class PerHead(Mask):
    """A mask for each head by its number, and one for the rest: `PerHead({0: Causal()}, default=NoKeys())`."""

    masks: tuple[tuple[int, Mask], ...]
    default: Mask

    def __init__(self, masks: Mapping[int, Mask], *, default: Mask | None = None) -> None:
        for head in masks:
            if head < 0:
                raise ValueError(f"Heads: head {head} does not exist; heads are numbered from 0")
        object.__setattr__(self, "masks", tuple(sorted(masks.items())))
        object.__setattr__(self, "default", NoKeys() if default is None else default)

    def __call__(self, h: Tensor, q: TokenPositions, k: TokenPositions) -> Bool[Tensor, "..."]:
        seen = self.default(h, q, k)
        for head, mask in self.masks:
            seen = torch.where(h == head, mask(h, q, k), seen)
        return seen

    def bounds(self, q: TokenBounds, k: TokenBounds) -> VisibilityBounds:
        """What holds in every head."""
        may, must = self.default.bounds(q, k)
        for _, mask in self.masks:
            one = mask.bounds(q, k)
            may, must = may | one.any_visible, must & one.all_visible
        return VisibilityBounds(may, must)

    @property
    def per_head(self) -> bool:
        return True

    @property
    def causal(self) -> bool:
        return all(mask.causal for mask in self._all())

    @property
    def max_lookback(self) -> int | None:
        known = [mask.max_lookback for mask in self._all()]
        return None if None in known else max(reach for reach in known if reach is not None)

    @property
    def periods(self) -> frozenset[int]:
        return frozenset().union(*(mask.periods for mask in self._all()))

    def for_head(self, number: int) -> Mask:
        return dict(self.masks).get(number, self.default).for_head(number)

    def __repr__(self) -> str:
        named = ", ".join(f"{head}: {mask!r}" for head, mask in self.masks)
        return f"PerHead({{{named}}}, default={self.default!r})"

    def _all(self) -> tuple[Mask, ...]:
        return (*(mask for _, mask in self.masks), self.default)
