"""Bounds of the positions of token sets, and of the visibility of all pairs of two sets."""

from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from manyformer.core import tree_map


class TokenBounds(NamedTuple):
    """Lower and upper bounds of the positions, segments, roles and parts of token sets, one set per entry.

    `residues` maps periods to bounds of the positions modulo that period, for sets that are not contiguous.
    """

    first: Int[Tensor, "*n"]
    last: Int[Tensor, "*n"]
    segments: tuple[Int[Tensor, "*n"], Int[Tensor, "*n"]]
    roles: tuple[Int[Tensor, "*n"], Int[Tensor, "*n"]]
    parts: tuple[Int[Tensor, "*n"], Int[Tensor, "*n"]]
    residues: dict[int, tuple[Tensor, Tensor]]

    def residue_bounds(self, period: int) -> tuple[Int[Tensor, "*n"], Int[Tensor, "*n"]]:
        """Bounds of the positions modulo `period`."""
        if period in self.residues:
            return self.residues[period]
        same_period = self.first // period == self.last // period
        low = torch.where(same_period, self.first % period, 0)
        return low, torch.where(same_period, self.last % period, period - 1)

    def select(self, index: Any) -> "TokenBounds":
        """The token sets at `index`."""
        return TokenBounds(*tree_map(lambda bound: bound[index], tuple(self)))


class VisibilityBounds(NamedTuple):
    """For every pair of a query set and a key set: whether any key may be visible, and whether all keys surely are."""

    any_visible: Bool[Tensor, "..."]
    all_visible: Bool[Tensor, "..."]

    def both(self, right: "VisibilityBounds") -> "VisibilityBounds":
        """The bounds of what both show."""
        return VisibilityBounds(self.any_visible & right.any_visible, self.all_visible & right.all_visible)

    def either(self, right: "VisibilityBounds") -> "VisibilityBounds":
        """The bounds of what one of them shows."""
        return VisibilityBounds(self.any_visible | right.any_visible, self.all_visible | right.all_visible)

    def inverse(self) -> "VisibilityBounds":
        """The bounds of what is not shown."""
        return VisibilityBounds(~self.all_visible, ~self.any_visible)


def no_bounds(q: TokenBounds, k: TokenBounds) -> VisibilityBounds:
    """The bounds that hold for every mask."""
    no_pair = torch.zeros(pair_shape(q, k), dtype=torch.bool, device=q.first.device)
    return VisibilityBounds(~no_pair, no_pair)


def pair_shape(q: TokenBounds, k: TokenBounds) -> torch.Size:
    """The shape of `VisibilityBounds` of `q` and `k`."""
    shape: torch.Size = torch.broadcast_shapes(q.first.shape, k.first.shape)  # type: ignore[no-untyped-call]
    return shape
