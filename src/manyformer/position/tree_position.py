"""Positions in dependency trees (Wang et al. 2019, Self-Attention with Structural Position Representations)."""

from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from manyformer.core import TokenPositions
from manyformer.position.absolute import SinusoidalPosition
from manyformer.position.position import Keys, Outputs, PairScores, Position, Queries
from manyformer.position.relative import key_score_terms, value_output_terms
from manyformer.structures import DependencyTree


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
    key_is_ancestor = _in_range(query_order, key_order, key.last_descendant[:, None, :])
    key_is_descendant = _in_range(key_order, query_order, query.last_descendant[:, :, None])
    query_depth = query.depth[:, :, None]
    key_depth = key.depth[:, None, :]
    sign = (key_positions.position_ids[:, None, :] - query_positions.position_ids[:, :, None]).sign()
    return torch.where(key_is_ancestor | key_is_descendant, key_depth - query_depth, sign * (key_depth + query_depth))


def tree_of(positions: TokenPositions) -> DependencyTree:
    """The dependency tree of `positions`. Raises ValueError if it is missing."""
    if positions.tree is None:
        raise ValueError(
            "structural positions need the tree of every sentence: pass `trees` (see manyformer.structures)"
        )
    return positions.tree


def _in_range(number: Tensor, first: Tensor, last: Tensor) -> Tensor:
    return (first <= number) & (number <= last)
