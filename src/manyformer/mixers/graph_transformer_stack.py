"""Transformer layers over the edges of graphs, with a second stream for the edges themselves."""

from typing import final

from jaxtyping import Float
from torch import Tensor, nn

from manyformer.core import Context, Layer, LayerOutput, State
from manyformer.dropout import Dropout
from manyformer.mixers.graph_attention import edges_of, watch_edge_weights
from manyformer.ops.edge_attention import edge_softmax, sum_over_edges
from manyformer.structures import GraphEdges


@final
class GraphTransformerStack(Layer):
    """Post-norm layers in which a node attends to its neighbours (Dwivedi and Bresson 2021, section 2.2).

    With `edge_features` the product of query and key is multiplied channel by channel with a projection of the edge,
    and becomes the edge's next state (equations 8 to 12); the last layer needs none. Raises ValueError if there are no
    edges, or none with features."""

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


class _EdgeTransformerLayer(nn.Module):
    """One layer for both streams."""

    def __init__(
        self, dim: int, heads: int, ff_dim: int, dropout: float, *, reads_edges: bool, updates_edges: bool
    ) -> None:
        super().__init__()
        self.heads = heads
        # queries and keys of all heads, then values
        self.projection = nn.Linear(dim, 3 * dim, bias=False)
        self.edge_projection = nn.Linear(dim, dim, bias=False) if reads_edges else None
        self.node_update = _StreamUpdate(dim, ff_dim, dropout)
        self.edge_update = _StreamUpdate(dim, ff_dim, dropout) if updates_edges else None

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
