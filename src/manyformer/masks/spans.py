"""What is known of whole sets of tokens, and of all pairs of two of them."""

from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from manyformer.core import tree_map


class Span(NamedTuple):
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

    def at(self, index: Any) -> "Span":
        """The sets of that index."""
        return Span(*tree_map(lambda bound: bound[index], tuple(self)))


class Bounds(NamedTuple):
    """Of every pair of two sets of tokens: `may` some pair be visible, `must` all of them be."""

    may: Bool[Tensor, "..."]
    must: Bool[Tensor, "..."]


def nothing_known(q: Span, k: Span) -> Bounds:
    """The bounds that are always true."""
    never = torch.zeros(pairs_of(q, k), dtype=torch.bool, device=q.first.device)
    return Bounds(~never, never)


def pairs_of(q: Span, k: Span) -> torch.Size:
    """The shape of what is said about each pair of `q` and `k`."""
    shape: torch.Size = torch.broadcast_shapes(q.first.shape, k.first.shape)  # type: ignore[no-untyped-call]
    return shape
