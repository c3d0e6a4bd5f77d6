"""Attention of each node to the nodes that have an edge to it, with additive scores (GAT and GATv2)."""

from abc import ABC, abstractmethod
from typing import Literal, final

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from manyformer.core import Context, Layer, LayerOutput, State, TokenPositions, no_watch
from manyformer.dropout import Dropout
from manyformer.ops.edge_attention import edge_softmax, sum_over_edges
from manyformer.structures import GraphEdges

NEGATIVE_SLOPE = 0.2
"""The slope of LeakyReLU for negative scores (Velickovic et al. 2018, section 2.1)."""

HeadMerge = Literal["concat", "mean"]


class EdgeScores(nn.Module, ABC):
    """The scores and the values of edges, from projections of their nodes: `projections` of each head's width."""

    projections: int

    @abstractmethod
    def forward(
        self, x: Float[Tensor, "nodes h width"], edges: GraphEdges
    ) -> tuple[Float[Tensor, "edges h"], Float[Tensor, "nodes h e"]]:
        """The scores of the edges, and the values of the nodes."""


@final
class AdditiveScores(EdgeScores):
    """LeakyReLU(a_t . h_i + a_s . h_j) for an edge from j to i (Velickovic et al. 2018, equation 3)."""

    projections = 1

    def __init__(self, heads: int, head_dim: int) -> None:
        super().__init__()
        self.source, self.target = (nn.Parameter(torch.empty(heads, head_dim)) for _ in range(2))
        for weight in (self.source, self.target):
            # Glorot's distribution for the map from 2 e numbers to a score
            bound = (6 / (2 * head_dim + 1)) ** 0.5
            nn.init.uniform_(weight, -bound, bound)

    def forward(
        self, x: Float[Tensor, "nodes h width"], edges: GraphEdges
    ) -> tuple[Float[Tensor, "edges h"], Float[Tensor, "nodes h e"]]:
        source_scores = (x * self.source).sum(-1)
        target_scores = (x * self.target).sum(-1)
        sums = source_scores.index_select(0, edges.sources) + target_scores.index_select(0, edges.targets)
        return F.leaky_relu(sums, NEGATIVE_SLOPE), x


@final
class DynamicScores(EdgeScores):
    """a . LeakyReLU(W_t h_i + W_s h_j) for an edge from j to i (Brody et al. 2022, equation 7).

    The values are W_s h_j. Unlike GAT's, the order of a node's sources by score depends on the node."""

    projections = 2

    def __init__(self, heads: int, head_dim: int) -> None:
        super().__init__()
        self.vector = nn.Parameter(torch.empty(heads, head_dim))
        bound = (6 / (head_dim + 1)) ** 0.5
        nn.init.uniform_(self.vector, -bound, bound)

    def forward(
        self, x: Float[Tensor, "nodes h width"], edges: GraphEdges
    ) -> tuple[Float[Tensor, "edges h"], Float[Tensor, "nodes h e"]]:
        target_part, source_part = x.chunk(2, -1)
        sums = target_part.index_select(0, edges.targets) + source_part.index_select(0, edges.sources)
        return (F.leaky_relu(sums, NEGATIVE_SLOPE) * self.vector).sum(-1), source_part


@final
class GraphAttention(Layer):
    """Each node becomes the mean of its sources' values, weighted by a softmax of their scores (GAT, section 2.1).

    The layer takes nodes that are projected already, to `heads` times `scores.projections` times `head_dim` channels,
    and adds a bias. Heads are concatenated, or averaged in the last layer (equations 5 and 6). `dropout` is that of
    the weights, and of the values as in the released code. Raises ValueError if there are no edges."""

    def __init__(
        self, heads: int, head_dim: int, scores: EdgeScores, *, merge: HeadMerge = "concat", dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.heads = heads
        self.merge = merge
        self.scores = scores
        self.bias = nn.Parameter(torch.zeros(heads * head_dim if merge == "concat" else head_dim))
        self.dropout = Dropout(dropout)

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> LayerOutput:
        rows, length, _ = x.shape
        edges = edges_of(ctx.positions)
        scores, values = self.scores(x.reshape(rows * length, self.heads, -1), edges)
        weights = edge_softmax(scores, edges)
        watch_edge_weights(ctx, self, weights, edges)
        y = sum_over_edges(self.dropout(weights), self.dropout(values), edges)
        if self.merge == "concat":
            merged = y.flatten(1)
        else:
            merged = y.mean(1)
        return LayerOutput((merged + self.bias).view(rows, length, -1))


def watch_edge_weights(ctx: Context, layer: nn.Module, weights: Float[Tensor, "edges h"], edges: GraphEdges) -> None:
    """Report the weights of edges to `ctx.watch` as those of all pairs of nodes (b, h, l, l), 0 without an edge."""
    if ctx.watch is no_watch:
        return
    rows, length = ctx.positions.position_ids.shape
    pairs = weights.new_zeros(rows * length * length, weights.shape[1])
    pairs.index_add_(0, edges.targets * length + edges.sources % length, weights)
    ctx.watch(layer, "weights", pairs.view(rows, length, length, -1).permute(0, 3, 1, 2))


def edges_of(positions: TokenPositions) -> GraphEdges:
    """The edges of the graphs. Raises ValueError if the model was given none."""
    if positions.edges is None:
        raise ValueError("this layer needs the edges of a graph, which TokenPositions.edges holds")
    return positions.edges
