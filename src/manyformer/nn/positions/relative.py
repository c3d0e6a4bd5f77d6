"""Relative positions as learned vectors that are added to keys and values, by distance, label or place in a tree."""

from typing import Literal, final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from manyformer.nn.core import SUMMARY_ROLE, DependencyTree, TokenPositions
from manyformer.nn.positions.absolute import SinusoidalPosition
from manyformer.nn.positions.distance_bias import BiasDirection, check_direction
from manyformer.nn.positions.position import (
    DistanceTerms,
    Keys,
    Outputs,
    PairScores,
    Position,
    Queries,
    signed_distances,
)
from manyformer.nn.runtime.handwritten_gradient import hides_values
from manyformer.nn.runtime.head_selection import PerHeadTensors


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
        # one row for distance 0, and one for each distance up to `clip` on either side
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
    # a query times every row of the table, of which each pair takes its own
    # also where autocast has made the queries alone half precision, and does not act on the product
    products: Tensor = q @ table.to(q.dtype).mT * q.shape[-1] ** -0.5
    return products.gather(-1, rows[:, None].expand(*products.shape[:-1], -1))


def value_output_terms(
    weights: Float[Tensor, "b h l s"], table: Float[Tensor, "*t r f"], rows: Int[Tensor, "#b l s"]
) -> Float[Tensor, "b h l f"]:
    """The output terms of vectors added to values: each table row times the summed weights of the pairs using it."""
    weight_per_row = weights.new_zeros(*weights.shape[:-1], table.shape[-2])
    # weights are summed by row first: the values of the table are multiplied once for each row, not for each pair
    return weight_per_row.scatter_add(-1, rows[:, None].expand(weights.shape), weights) @ table


@final
class RelativeLabelPosition(Position, PerHeadTensors):
    """A learned vector and bias per pair label, added to keys and scores (Ainslie et al. 2020, arXiv:2004.08483).

    Their section on relative position encoding: e_ij = (q_i (k_j + keys[r]) + bias[r]) / sqrt(e), as released; nothing
    is added to values. Labels r of two tokens of a text, or of two summaries, are their distance clipped to `clip` on
    either side. A summary and a token have one label, or with `cross_labels=2` one label if they belong to the same
    part and another if they do not. Each head has its own table. Released models also have labels for tokens of
    different documents, which do not attend to each other here.
    """

    head_axes = (("keys", -3), ("bias", -2))

    def __init__(self, width: int, heads: int, clip: int = 12, *, cross_labels: Literal[1, 2] = 2) -> None:
        super().__init__()
        if clip < 1:
            raise ValueError(
                f"RelativeLabelPosition: clip ({clip}) must be at least 1; all larger distances share a label"
            )
        self.clip = clip
        self.cross_labels = cross_labels
        label_count = 2 * clip + 1 + cross_labels
        self.keys = nn.Parameter(torch.empty(heads, label_count, width))
        self.bias = nn.Parameter(torch.zeros(heads, label_count))
        # the released standard deviation; products with a query then have the query's scale
        if not hides_values():
            nn.init.trunc_normal_(self.keys, std=0.5, a=-1.0, b=1.0)

    def pair_labels(self, query_positions: TokenPositions, key_positions: TokenPositions) -> Int[Tensor, "b l s"]:
        """The label of each pair."""
        distance_labels = signed_distances(query_positions, key_positions).clamp(-self.clip, self.clip) + self.clip
        if query_positions.roles is None or key_positions.roles is None:
            return distance_labels
        is_summary = query_positions.roles == SUMMARY_ROLE, key_positions.roles == SUMMARY_ROLE
        is_cross_pair = is_summary[0][:, :, None] != is_summary[1][:, None, :]
        cross_label = torch.full((), 2 * self.clip + 1, device=distance_labels.device)
        if self.cross_labels == 2 and query_positions.part_ids is not None and key_positions.part_ids is not None:
            query_parts = query_positions.part_ids[:, :, None]
            key_parts = key_positions.part_ids[:, None, :]
            # tokens of no part are in no summary's
            cross_label = cross_label + ((query_parts != key_parts) | (query_parts < 0))
        return torch.where(is_cross_pair, cross_label, distance_labels)

    def score(
        self, logits: PairScores, q: Queries, k: Keys, query_positions: TokenPositions, key_positions: TokenPositions
    ) -> PairScores:
        label_scores: Tensor = (q @ self.keys.mT + self.bias[:, None]) * q.shape[-1] ** -0.5
        labels = self.pair_labels(query_positions, key_positions)[:, None]
        return logits + label_scores.gather(-1, labels.expand(*label_scores.shape[:-1], -1))

    def extra_repr(self) -> str:
        return f"{len(self.bias)} heads, clip={self.clip}, {self.cross_labels} for a summary and a token"


@final
class KeyDistancePosition(Position):
    """Scores q_i (k_j + p_(i-j)) / sqrt(e), a vector p for each distance up to `max_distance` (Sukhbaatar et al. 2019).

    arXiv:1905.07799, section 2; as in the authors' code one table serves all heads and, if it is the same object, all
    layers. The mask must hide keys at larger distances and later keys: their distances are clamped to the table.
    """

    def __init__(self, width: int, max_distance: int) -> None:
        super().__init__()
        if max_distance < 1:
            raise ValueError(f"KeyDistancePosition: max_distance ({max_distance}) must be at least 1")
        # row 0 is for `max_distance`, the last row for distance 0
        self.keys = nn.Parameter(torch.randn(max_distance + 1, width) / width**0.5)

    def score(
        self, logits: PairScores, q: Queries, k: Keys, query_positions: TokenPositions, key_positions: TokenPositions
    ) -> PairScores:
        max_distance = len(self.keys) - 1
        rows = signed_distances(query_positions, key_positions).clamp(-max_distance, 0) + max_distance
        return logits + key_score_terms(q, self.keys, rows)

    def distance_terms(self, lookback: int, lookahead: int) -> DistanceTerms:
        lookback = min(lookback, len(self.keys) - 1)
        rows = self.keys[len(self.keys) - 1 - lookback :]
        return DistanceTerms(lookback, 0, keys=rows[None] * rows.shape[1] ** -0.5)

    def extra_repr(self) -> str:
        return f"max_distance={len(self.keys) - 1}"


@final
class FusedTreePosition(Position):
    """tanh(PE(position) U + PE(depth) V) added to the embeddings, both PE the sinusoids of the Transformer.

    Wang et al. 2019, absolute structural positions. A token in no tree has depth -1, which no tree node has.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.sinusoid = SinusoidalPosition(dim)
        self.sequential, self.structural = (nn.Linear(dim, dim, bias=False) for _ in range(2))

    def embed(self, x: Float[Tensor, "b l d"], positions: TokenPositions) -> Float[Tensor, "b l d"]:
        zeros = torch.zeros_like(x)
        order = self.sinusoid.embed(zeros, positions)
        depth = self.sinusoid.embed(zeros, positions._replace(position_ids=tree_of(positions).depth, layout=None))
        return x + torch.tanh(self.sequential(order) + self.structural(depth))


@final
class TreeOffsetPosition(Position):
    """A learned vector for each structural offset, added to keys and values as Shaw et al. (2018) do for distances.

    Offsets are clipped to `clip` on either side; pairs with a token in no tree share a separate vector. One table for
    keys and one for values serve all heads; their `width` is that of a head.
    """

    def __init__(self, width: int, clip: int = 16) -> None:
        super().__init__()
        if clip < 1:
            raise ValueError(f"TreeOffsetPosition: clip ({clip}) must be at least 1 edge")
        self.clip = clip
        self.keys, self.values = (nn.Parameter(torch.empty(2 * clip + 2, width)) for _ in range(2))
        for table in (self.keys, self.values):
            nn.init.xavier_uniform_(table)

    def score(
        self, logits: PairScores, q: Queries, k: Keys, query_positions: TokenPositions, key_positions: TokenPositions
    ) -> PairScores:
        return logits + key_score_terms(q, self.keys, self.row_index(query_positions, key_positions))

    def value(
        self, y: Outputs, weights: PairScores, query_positions: TokenPositions, key_positions: TokenPositions
    ) -> Outputs:
        return y + value_output_terms(weights, self.values, self.row_index(query_positions, key_positions))

    def row_index(self, query_positions: TokenPositions, key_positions: TokenPositions) -> Int[Tensor, "b l s"]:
        """The row of each pair in the two tables."""
        in_tree = (tree_of(query_positions).depth >= 0)[:, :, None] & (tree_of(key_positions).depth >= 0)[:, None, :]
        # the last row is for pairs with a token outside of the tree
        clipped = tree_offsets(query_positions, key_positions).clamp(-self.clip, self.clip) + self.clip
        return torch.where(in_tree, clipped, 2 * self.clip + 1)


def tree_offsets(query_positions: TokenPositions, key_positions: TokenPositions) -> Int[Tensor, "b l s"]:
    """The structural offset of every query-key pair in the tree; undefined if either token is in no tree.

    If one token is an ancestor of the other, it is the depth of the key minus the depth of the query; else the sum of
    both depths, positive if the key is to the right of the query. So r(a, b) = -r(b, a), and in a chain, where each
    token's head is the preceding token, it is Shaw's distance, key minus query. The paper gives it for a query to the
    right of its key. By its definition a sum may equal a difference: at depth 1 a sibling has the offset of a
    grandchild.
    """
    query = tree_of(query_positions)
    key = tree_of(key_positions)
    query_order = query.preorder[:, :, None]
    key_order = key.preorder[:, None, :]
    # the numbers of a subtree in preorder are one range
    key_is_ancestor = _in_range(query_order, key_order, key.last_descendant[:, None, :])
    key_is_descendant = _in_range(key_order, query_order, query.last_descendant[:, :, None])
    query_depth = query.depth[:, :, None]
    key_depth = key.depth[:, None, :]
    # a key to the right has a positive offset
    sign = (key_positions.position_ids[:, None, :] - query_positions.position_ids[:, :, None]).sign()
    return torch.where(key_is_ancestor | key_is_descendant, key_depth - query_depth, sign * (key_depth + query_depth))


def tree_of(positions: TokenPositions) -> DependencyTree:
    """The dependency tree of `positions`. Raises ValueError if it is missing."""
    if positions.tree is None:
        raise ValueError(
            "structural positions need the tree of every sentence: pass `trees` (see manyformer.nn.structures)"
        )
    return positions.tree


def _in_range(number: Tensor, first: Tensor, last: Tensor) -> Tensor:
    return (first <= number) & (number <= last)
