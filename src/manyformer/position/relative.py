"""Relative positions as learned vectors that are added to keys and values."""

from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from manyformer.core import TokenPositions
from manyformer.head_selection import PerHeadTensors
from manyformer.position.distance_bias import BiasDirection, check_direction
from manyformer.position.distance_terms import DistanceTerms, signed_distances
from manyformer.position.position import Keys, Outputs, PairScores, Position, Queries


@final
class ShawPosition(Position, PerHeadTensors):
    """A learned vector per distance added to keys, and another added to values (Shaw et al. 2018, arXiv:1803.02155).

    Section 3.1: e_ij = q_i (k_j + keys[r]) / sqrt(e) and z_i = sum_j a_ij (v_j + values[r]), with r = j - i clipped to
    `clip` on either side; section 3.3: no tensor with an entry for each pair and channel is materialized. With
    `direction="past"`, for causal masks, the tables have no rows for later keys. `heads` gives each head its own
    tables, as in the paper's base models; otherwise heads share them. `value_width` is the width of values, `width` by
    default.
    """

    head_axes = (("keys", -3), ("values", -3))

    def __init__(
        self,
        width: int,
        clip: int = 16,
        *,
        value_width: int | None = None,
        heads: int | None = None,
        direction: BiasDirection = "both",
    ) -> None:
        super().__init__()
        if clip < 1:
            raise ValueError(f"ShawPosition: clip ({clip}) must be at least 1; all larger distances share a row")
        check_direction(direction)
        row_count = (clip if direction == "past" else 2 * clip) + 1
        self.clip = self.max_distance = clip
        self.direction = direction
        head_shape = () if heads is None else (heads,)
        self.keys = nn.Parameter(torch.empty(*head_shape, row_count, width))
        self.values = nn.Parameter(torch.empty(*head_shape, row_count, width if value_width is None else value_width))
        for table in (self.keys, self.values):
            for matrix in table.data.view(-1, *table.shape[-2:]):
                nn.init.xavier_uniform_(matrix)

    def row_index(self, distances: Int[Tensor, "*p"]) -> Int[Tensor, "*p"]:
        """The table row for each signed distance (key position minus query position)."""
        return distances.clamp(-self.clip, 0 if self.direction == "past" else self.clip) + self.clip

    def score(
        self, logits: PairScores, q: Queries, k: Keys, query_positions: TokenPositions, key_positions: TokenPositions
    ) -> PairScores:
        return logits + key_score_terms(q, self.keys, self.row_index(signed_distances(query_positions, key_positions)))

    def value(
        self, y: Outputs, weights: PairScores, query_positions: TokenPositions, key_positions: TokenPositions
    ) -> Outputs:
        rows = self.row_index(signed_distances(query_positions, key_positions))
        return y + value_output_terms(weights, self.values, rows)

    def distance_terms(self, lookback: int, lookahead: int) -> DistanceTerms:
        lookback = min(lookback, self.clip)
        lookahead = min(lookahead, 0 if self.direction == "past" else self.clip)
        rows = slice(self.clip - lookback, self.clip + lookahead + 1)
        keys, values = (table.view(-1, *table.shape[-2:])[:, rows] for table in (self.keys, self.values))
        return DistanceTerms(lookback, lookahead, keys=keys * keys.shape[-1] ** -0.5, values=values)

    def extra_repr(self) -> str:
        tables = "each head" if self.keys.ndim == 3 else "all heads"
        return f"clip={self.clip}, direction={self.direction}, tables for {tables}"


def key_score_terms(
    q: Float[Tensor, "b h l e"], table: Float[Tensor, "*t r e"], rows: Int[Tensor, "#b l s"]
) -> Float[Tensor, "b h l s"]:
    """The score terms q table[row] / sqrt(e) of vectors added to keys; `rows` holds the table row of each pair."""
    products: Tensor = q @ table.mT * q.shape[-1] ** -0.5
    return products.gather(-1, rows[:, None].expand(*products.shape[:-1], -1))


def value_output_terms(
    weights: Float[Tensor, "b h l s"], table: Float[Tensor, "*t r f"], rows: Int[Tensor, "#b l s"]
) -> Float[Tensor, "b h l f"]:
    """The output terms of vectors added to values: each table row times the summed weights of the pairs using it."""
    weight_per_row = weights.new_zeros(*weights.shape[:-1], table.shape[-2])
    return weight_per_row.scatter_add(-1, rows[:, None].expand(weights.shape), weights) @ table
