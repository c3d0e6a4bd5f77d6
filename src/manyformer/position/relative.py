"""Relative positions as vectors that are added to keys and values."""

from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from manyformer.core import TokenPositions
from manyformer.position.distance_bias import BiasDirection, check_sides
from manyformer.position.distance_terms import DistanceTerms, distance
from manyformer.position.position import Position


@final
class ShawPosition(Position):
    """A vector for each distance, added to keys and another one to values (Shaw et al. 2018, arXiv:1803.02155).

    Section 3.1: e_ij = q_i (k_j + keys[r]) / sqrt(e) and z_i = sum_j a_ij (v_j + values[r]), with r = j - i clipped to
    `clip` on either side; section 3.3: no tensor with an entry for each pair and channel is ever made. Under a causal
    mask, `sides="past"`, rows for keys ahead would never be used and are not there. `heads` gives each head tables of
    its own, as in the paper's base models; otherwise heads share them. `value` is the width of values, `width` unless
    given.
    """

    def __init__(
        self,
        width: int,
        clip: int = 16,
        *,
        value: int | None = None,
        heads: int | None = None,
        sides: BiasDirection = "both",
    ) -> None:
        super().__init__()
        if clip < 1:
            raise ValueError(f"ShawPosition: clip ({clip}) must be at least 1; beyond it all distances are alike")
        check_sides(sides)
        rows = (clip if sides == "past" else 2 * clip) + 1
        self.clip = self.max_distance = clip
        self.sides = sides
        tables = () if heads is None else (heads,)
        self.keys = nn.Parameter(torch.empty(*tables, rows, width))
        self.values = nn.Parameter(torch.empty(*tables, rows, width if value is None else value))
        for table in (self.keys, self.values):
            for one in table.data.view(-1, *table.shape[-2:]):
                nn.init.xavier_uniform_(one)

    def row(self, ahead: Int[Tensor, "*p"]) -> Int[Tensor, "*p"]:
        """The row of a key that is so far ahead of its query."""
        return ahead.clamp(-self.clip, 0 if self.sides == "past" else self.clip) + self.clip

    def score(
        self,
        logits: Float[Tensor, "b h l s"],
        q: Float[Tensor, "b h l e"],
        k: Float[Tensor, "b h s e"],
        query_positions: TokenPositions,
        key_positions: TokenPositions,
    ) -> Float[Tensor, "b h l s"]:
        return logits + from_keys(q, self.keys, self.row(distance(query_positions, key_positions)))

    def value(
        self,
        y: Float[Tensor, "b h l f"],
        weights: Float[Tensor, "b h l s"],
        query_positions: TokenPositions,
        key_positions: TokenPositions,
    ) -> Float[Tensor, "b h l f"]:
        return y + from_values(weights, self.values, self.row(distance(query_positions, key_positions)))

    def distance_terms(self, back: int, ahead: int) -> DistanceTerms:
        back, ahead = min(back, self.clip), min(ahead, 0 if self.sides == "past" else self.clip)
        rows = slice(self.clip - back, self.clip + ahead + 1)
        keys, values = (table.view(-1, *table.shape[-2:])[:, rows] for table in (self.keys, self.values))
        return DistanceTerms(back, ahead, keys=keys * keys.shape[-1] ** -0.5, values=values)

    def extra_repr(self) -> str:
        return f"clip={self.clip}, sides={self.sides}, tables for {'each head' if self.keys.ndim == 3 else 'all heads'}"


def from_keys(
    q: Float[Tensor, "b h l e"], table: Float[Tensor, "*t r e"], rows: Int[Tensor, "#b l s"]
) -> Float[Tensor, "b h l s"]:
    """What vectors added to keys add to scores, q table[row] / sqrt(e), where `rows` names the row of each pair."""
    each: Tensor = q @ table.mT * q.shape[-1] ** -0.5
    return each.gather(-1, rows[:, None].expand(*each.shape[:-1], -1))


def from_values(
    weights: Float[Tensor, "b h l s"], table: Float[Tensor, "*t r f"], rows: Int[Tensor, "#b l s"]
) -> Float[Tensor, "b h l f"]:
    """What vectors added to values add to outputs: each row of a table times the weights of the pairs that have it."""
    mass = weights.new_zeros(*weights.shape[:-1], table.shape[-2])
    return mass.scatter_add(-1, rows[:, None].expand(weights.shape), weights) @ table
