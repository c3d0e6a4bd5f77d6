"""Layers over the edges of graphs: additive attention (GAT and GATv2), the graph convolution, the graph Transformer.

Softmax and weighted sums over the edges that end at a node take time and memory linear in the edges."""

from abc import ABC, abstractmethod
from typing import Any, Literal, final

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from manyformer.nn.core import Context, GraphEdges, Layer, LayerOutput, State, TokenPositions, no_watch
from manyformer.nn.runtime.dropout import Dropout
from manyformer.nn.runtime.handwritten_gradient import HandwrittenGradient
from manyformer.nn.runtime.training_hooks import FusedRows, OptimizerHints

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
        # a sum of two products is one number for each node, taken before edges are looked at
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
            # the classes of the last layer are as many as a head is wide
            merged = y.mean(1)
        return LayerOutput((merged + self.bias).view(rows, length, -1))


def watch_edge_weights(ctx: Context, layer: nn.Module, weights: Float[Tensor, "edges h"], edges: GraphEdges) -> None:
    """Report the weights of edges to `ctx.watch` as those of all pairs of nodes (b, h, l, l), 0 without an edge."""
    if ctx.watch is no_watch:
        return
    rows, length = ctx.positions.position_ids.shape
    pairs = weights.new_zeros(rows * length * length, weights.shape[1])
    # the row of a pair is its target among all nodes, its column the source within the same graph; several edges add up
    pairs.index_add_(0, edges.targets * length + edges.sources % length, weights)
    ctx.watch(layer, "weights", pairs.view(rows, length, length, -1).permute(0, 3, 1, 2))


def edges_of(positions: TokenPositions) -> GraphEdges:
    """The edges of the graphs. Raises ValueError if the model was given none."""
    if positions.edges is None:
        raise ValueError("this layer needs the edges of a graph, which TokenPositions.edges holds")
    return positions.edges


@final
class GraphConvolution(Layer):
    """y_i = b + sum_j x_j / sqrt(d_i d_j) over the edges from j to i (Kipf and Welling 2017, equation 2).

    d counts the edges that end at a node. The layer takes nodes that are projected already; the paper's graphs have an
    edge from every node to itself. Raises ValueError if there are no edges."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(dim))

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> LayerOutput:
        edges = edges_of(ctx.positions)
        # a node at which no edge ends has no part in any sum of the paper's graphs
        scale = edges.row_starts.diff().clamp(min=1).to(x.dtype).rsqrt()
        weights = scale.index_select(0, edges.sources) * scale.index_select(0, edges.targets)
        sums = sum_over_edges(weights[:, None], x.flatten(0, 1)[:, None], edges)
        return LayerOutput(sums.view_as(x) + self.bias)


@final
class GraphTransformerStack(Layer, OptimizerHints):
    """Post-norm layers in which a node attends to its neighbors (Dwivedi and Bresson 2021, section 2.2).

    With `edge_features` the product of query and key is multiplied channel by channel with a projection of the edge,
    and becomes the edge's next state (equations 8 to 12); the last layer needs none. Raises ValueError if there are no
    edges, or none with features."""

    adamw_weights = ("edge_embed.weight",)

    def __init__(
        self, depth: int, dim: int, heads: int, *, edge_features: int = 0, ff_dim: int, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.edge_embed = nn.Linear(edge_features, dim) if edge_features else None
        self.layers = nn.ModuleList(
            _EdgeTransformerLayer(
                dim,
                heads,
                ff_dim,
                dropout,
                reads_edges=edge_features > 0,
                updates_edges=edge_features > 0 and number < depth - 1,
            )
            for number in range(depth)
        )

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> LayerOutput:
        edges = edges_of(ctx.positions)
        nodes = x.flatten(0, 1)
        stream = None
        if self.edge_embed is not None:
            if edges.features is None:
                raise ValueError("this model reads features of edges, and the edges have none")
            stream = self.edge_embed(edges.features.to(x.dtype))
        for layer in self.layers:
            nodes, stream = layer(nodes, stream, edges, ctx)
        return LayerOutput(nodes.view_as(x))


class _EdgeTransformerLayer(nn.Module, FusedRows):
    """One layer for both streams."""

    def __init__(
        self, dim: int, heads: int, ff_dim: int, dropout: float, *, reads_edges: bool, updates_edges: bool
    ) -> None:
        super().__init__()
        self.dim = dim
        self.heads = heads
        # queries and keys of all heads, then values
        self.projection = nn.Linear(dim, 3 * dim, bias=False)
        self.edge_projection = nn.Linear(dim, dim, bias=False) if reads_edges else None
        self.node_update = _StreamUpdate(dim, ff_dim, dropout)
        self.edge_update = _StreamUpdate(dim, ff_dim, dropout) if updates_edges else None

    def row_parts(self) -> dict[str, tuple[int, ...]]:
        return {"projection.weight": (self.dim,) * 3}

    def forward(
        self, nodes: Float[Tensor, "n d"], stream: Float[Tensor, "edges d"] | None, edges: GraphEdges, ctx: Context
    ) -> tuple[Float[Tensor, "n d"], Float[Tensor, "edges d"] | None]:
        q, k, v = self.projection(nodes).view(len(nodes), 3, self.heads, -1).unbind(1)
        products = q.index_select(0, edges.targets) * k.index_select(0, edges.sources) * q.shape[-1] ** -0.5
        if self.edge_projection is not None:
            products = products * self.edge_projection(stream).view_as(products)
        weights = edge_softmax(products.sum(-1), edges)
        watch_edge_weights(ctx, self, weights, edges)
        nodes = self.node_update(nodes, sum_over_edges(weights, v, edges).flatten(1))
        if self.edge_update is not None:
            # what the edge becomes are the products of the channels before they are summed to a score
            stream = self.edge_update(stream, products.flatten(1))
        return nodes, stream


class _StreamUpdate(nn.Module):
    """The output projection of what was attended to and a feed-forward layer, each with a sum and a norm."""

    def __init__(self, dim: int, ff_dim: int, dropout: float) -> None:
        super().__init__()
        self.out_proj = nn.Linear(dim, dim)
        self.ff = nn.Sequential(nn.Linear(dim, ff_dim), nn.ReLU(), Dropout(dropout), nn.Linear(ff_dim, dim))
        self.norm = nn.LayerNorm(dim)
        self.ff_norm = nn.LayerNorm(dim)
        self.dropout = Dropout(dropout)

    def forward(self, x: Float[Tensor, "n d"], attended: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        x = self.norm(x + self.dropout(self.out_proj(attended)))
        y: Tensor = self.ff_norm(x + self.dropout(self.ff(x)))
        return y


def edge_softmax(scores: Float[Tensor, "edges h"], edges: GraphEdges) -> Float[Tensor, "edges h"]:
    """The softmax of the scores over all edges that end at the same node, for each head."""
    weights: Tensor = _EdgeSoftmax.call(scores, edges.targets, len(edges.row_starts) - 1)
    return weights


def sum_over_edges(
    weights: Float[Tensor, "edges h"], values: Float[Tensor, "nodes h e"], edges: GraphEdges
) -> Float[Tensor, "nodes h e"]:
    """The sum of the values of the sources of all edges that end at a node, weighted for each head; 0 without edges.

    The values of the edges are not stored for the gradient."""
    sums: Tensor = _EdgeSum.call(weights, values, edges.sources, edges.targets)
    return sums


def _sum_by_node(x: Float[Tensor, "edges *c"], index: Int[Tensor, " edges"], nodes: int) -> Float[Tensor, "nodes *c"]:
    return x.new_zeros(nodes, *x.shape[1:]).index_add_(0, index, x)


class _EdgeSoftmax(HandwrittenGradient):
    """da_ij = a_ij (g_ij - sum_k a_ik g_ik), with which only the weights are stored."""

    has_second_derivative = True

    @staticmethod
    def forward(ctx: Any, scores: Tensor, targets: Tensor, nodes: int) -> Tensor:
        index = targets[:, None].expand_as(scores)
        # subtracted before the exponential, as in any softmax; nodes without edges keep -inf and are never read
        highest = scores.new_full((nodes, scores.shape[1]), -torch.inf).scatter_reduce_(0, index, scores, "amax")
        weights = (scores - highest.index_select(0, targets)).exp_()
        weights /= _sum_by_node(weights, targets, nodes).index_select(0, targets)
        ctx.save_for_backward(weights, targets)
        ctx.nodes = nodes
        return weights

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        weights, targets = ctx.saved_tensors
        product = weights * gradient
        sums = _sum_by_node(product, targets, ctx.nodes)
        return product - weights * sums.index_select(0, targets), None, None

    @classmethod
    def plain(cls, *arguments: Any) -> Any:
        scores, targets, nodes = arguments
        index = targets[:, None].expand_as(scores)
        highest = scores.new_full((nodes, scores.shape[1]), -torch.inf).scatter_reduce(
            0, index, scores.detach(), "amax"
        )
        weights = (scores - highest.index_select(0, targets)).exp()
        return weights / _sum_by_node(weights, targets, nodes).index_select(0, targets)


class _EdgeSum(HandwrittenGradient):
    """The gradient gathers the values again."""

    has_second_derivative = True

    @staticmethod
    def forward(ctx: FunctionCtx, weights: Tensor, values: Tensor, sources: Tensor, targets: Tensor) -> Tensor:
        ctx.save_for_backward(weights, values, sources, targets)
        messages = values.index_select(0, sources).mul_(weights[..., None])
        return _sum_by_node(messages, targets, len(values))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        weights, values, sources, targets = ctx.saved_tensors
        # numbers of all edges exist one tensor at a time: they are the largest of a layer
        messages = gradient.index_select(0, targets)
        weights_gradient = (messages * values.index_select(0, sources)).sum(-1)
        values_gradient = _sum_by_node(messages * weights[..., None], sources, len(values))
        return weights_gradient, values_gradient, None, None
