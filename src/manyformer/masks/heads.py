"""Masks that differ from head to head."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Bool
from torch import Tensor

from manyformer.core import Place
from manyformer.masks.base import Mask, Nothing
from manyformer.masks.spans import Bounds, Span


@final
@dataclass(frozen=True, init=False)
class Heads(Mask):
    """A mask for each head by its number, and one for the rest: `Heads({0: Causal()}, rest=Nothing())`."""

    masks: tuple[tuple[int, Mask], ...]
    rest: Mask

    def __init__(self, masks: Mapping[int, Mask], *, rest: Mask | None = None) -> None:
        for head in masks:
            if head < 0:
                raise ValueError(f"Heads: head {head} does not exist; heads are numbered from 0")
        object.__setattr__(self, "masks", tuple(sorted(masks.items())))
        object.__setattr__(self, "rest", Nothing() if rest is None else rest)

    def __call__(self, h: Tensor, q: Place, k: Place) -> Bool[Tensor, "..."]:
        seen = self.rest(h, q, k)
        for head, mask in self.masks:
            seen = torch.where(h == head, mask(h, q, k), seen)
        return seen

    def bounds(self, q: Span, k: Span) -> Bounds:
        """What holds in every head."""
        may, must = self.rest.bounds(q, k)
        for _, mask in self.masks:
            one = mask.bounds(q, k)
            may, must = may | one.may, must & one.must
        return Bounds(may, must)

    @property
    def per_head(self) -> bool:
        return True

    @property
    def causal(self) -> bool:
        return all(mask.causal for mask in self._all())

    @property
    def reach(self) -> int | None:
        known = [mask.reach for mask in self._all()]
        return None if None in known else max(reach for reach in known if reach is not None)

    @property
    def periods(self) -> frozenset[int]:
        return frozenset().union(*(mask.periods for mask in self._all()))

    def head(self, number: int) -> Mask:
        return dict(self.masks).get(number, self.rest).head(number)

    def __repr__(self) -> str:
        named = ", ".join(f"{head}: {mask!r}" for head, mask in self.masks)
        return f"Heads({{{named}}}, rest={self.rest!r})"

    def _all(self) -> tuple[Mask, ...]:
        return (*(mask for _, mask in self.masks), self.rest)
