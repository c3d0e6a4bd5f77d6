"""What is known of whole sets of tokens, and of all pairs of two of them."""

from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from manyformer.core import tree_map


class TokenBounds(NamedTuple):
    """What is known of a set of tokens: bounds of their positions, segments, roles and parts, one set per entry.

    `rests` holds bounds of the positions modulo some numbers, for sets that are not contiguous.
    """

    first: Int[Tensor, "*n"]
    last: Int[Tensor, "*n"]
    seg: tuple[Int[Tensor, "*n"], Int[Tensor, "*n"]]
    role: tuple[Int[Tensor, "*n"], Int[Tensor, "*n"]]
    part: tuple[Int[Tensor, "*n"], Int[Tensor, "*n"]]
    rests: dict[int, tuple[Tensor, Tensor]]

    def rest(self, period: int) -> tuple[Int[Tensor, "*n"], Int[Tensor, "*n"]]:
        """Bounds of the positions modulo `period`."""
        if period in self.rests:
            return self.rests[period]
        within = self.first // period == self.last // period
        return torch.where(within, self.first % period, 0), torch.where(within, self.last % period, period - 1)

    def at(self, index: Any) -> "TokenBounds":
        """The sets of that index."""
        return TokenBounds(*tree_map(lambda bound: bound[index], tuple(self)))


class VisibilityBounds(NamedTuple):
    """Of every pair of two sets of tokens: `any_visible` some pair be visible, `all_visible` all of them be."""

    any_visible: Bool[Tensor, "..."]
    all_visible: Bool[Tensor, "..."]


def no_bounds(q: TokenBounds, k: TokenBounds) -> VisibilityBounds:
    """The bounds that are always true."""
    never = torch.zeros(pairs_of(q, k), dtype=torch.bool, device=q.first.device)
    return VisibilityBounds(~never, never)


def pairs_of(q: TokenBounds, k: TokenBounds) -> torch.Size:
    """The shape of what is said about each pair of `q` and `k`."""
    shape: torch.Size = torch.broadcast_shapes(q.first.shape, k.first.shape)  # type: ignore[no-untyped-call]
    return shape
