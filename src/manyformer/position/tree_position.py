"""Positions in dependency trees (Wang et al. 2019, Self-Attention with Structural Position Representations)."""

from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from manyformer.core import DependencyTree, TokenPositions
from manyformer.position.absolute import SinusoidalPosition
from manyformer.position.position import Position
from manyformer.position.relative import from_keys, from_values


@final
class FusedTreePosition(Position):
    """tanh(PE(position) U + PE(depth) V) added to the embeddings, both PE the sinusoids of the Transformer.

    Wang et al. 2019, absolute structural positions. A token in no tree has the depth -1, which no word has.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.sinusoid = SinusoidalPosition(dim)
        self.sequential, self.structural = (nn.Linear(dim, dim, bias=False) for _ in range(2))

    def embed(self, x: Float[Tensor, "b l d"], positions: TokenPositions) -> Float[Tensor, "b l d"]:
        nowhere = torch.zeros_like(x)
        order = self.sinusoid.embed(nowhere, positions)
        depth = self.sinusoid.embed(nowhere, positions._replace(position_ids=tree_of(positions).depth, layout=None))
        return x + torch.tanh(self.sequential(order) + self.structural(depth))


@final
class TreeOffsetPosition(Position):
    """A learned vector for each structural offset, added to keys and values as Shaw et al. (2018) do for distances.

    Offsets are clipped to `clip` on either side; pairs with a token in no tree have a vector of their own. One table
    for keys and one for values serve all heads; their `width` is that of a head.
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
        self,
        logits: Float[Tensor, "b h l s"],
        q: Float[Tensor, "b h l e"],
        k: Float[Tensor, "b h s e"],
        query_positions: TokenPositions,
        key_positions: TokenPositions,
    ) -> Float[Tensor, "b h l s"]:
        return logits + from_keys(q, self.keys, self.row(query_positions, key_positions))

    def value(
        self,
        y: Float[Tensor, "b h l f"],
        weights: Float[Tensor, "b h l s"],
        query_positions: TokenPositions,
        key_positions: TokenPositions,
    ) -> Float[Tensor, "b h l f"]:
        return y + from_values(weights, self.values, self.row(query_positions, key_positions))

    def row(self, query_positions: TokenPositions, key_positions: TokenPositions) -> Int[Tensor, "b l s"]:
        """The row of each pair in the two tables."""
        inside = (tree_of(query_positions).depth >= 0)[:, :, None] & (tree_of(key_positions).depth >= 0)[:, None, :]
        near = offsets(query_positions, key_positions).clamp(-self.clip, self.clip) + self.clip
        return torch.where(inside, near, 2 * self.clip + 1)


def offsets(query_positions: TokenPositions, key_positions: TokenPositions) -> Int[Tensor, "b l s"]:
    """How keys `key_positions` lie to queries `query_positions` in the tree; means nothing where either is in no tree.

    The depth of the key less the depth of the query where one hangs on the other, however indirectly; else the sum of
    both, positive where the key stands to the right of the query. So r(a, b) = -r(b, a), and in a chain, where each
    word hangs on the one before, it is Shaw's distance, key less query. The paper writes it for a query on the right
    of its key. By its definition a sum may equal a difference: at depth 1 a sibling is as far as a grandchild.
    """
    query, key = tree_of(query_positions), tree_of(key_positions)
    above = _within(query.preorder[:, :, None], key.preorder[:, None, :], key.last_descendant[:, None, :])
    below = _within(key.preorder[:, None, :], query.preorder[:, :, None], query.last_descendant[:, :, None])
    upper, lower = query.depth[:, :, None], key.depth[:, None, :]
    side = (key_positions.position_ids[:, None, :] - query_positions.position_ids[:, :, None]).sign()
    return torch.where(above | below, lower - upper, side * (lower + upper))


def tree_of(positions: TokenPositions) -> DependencyTree:
    """The tree of a place. Raises ValueError where there is none."""
    if positions.tree is None:
        raise ValueError(
            "structural positions need the tree of every sentence: pass `trees` (see manyformer.dependency_trees)"
        )
    return positions.tree


def _within(number: Tensor, first: Tensor, last: Tensor) -> Tensor:
    return (first <= number) & (number <= last)
