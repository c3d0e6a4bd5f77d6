"""Graphormer: full attention among the nodes of a graph, with scores by degrees and shortest paths."""

from functools import partial
from typing import Annotated

from torch import nn

from manyformer.models import ClassHead, GraphClassifier, NodeClassifier
from manyformer.models.graph_embedding import FeatureEmbedding, GraphormerEncoding
from manyformer.models.tasks.graph_labels import GRAPH_NODES, WHOLE_GRAPHS
from manyformer.nn.core import Layer
from manyformer.nn.positions.content_positions import GraphPairPosition
from manyformer.nn.softmax.softmax_kernel import SoftmaxKernel
from manyformer.recipes.graph_transformer import EdgeFeatureCount
from manyformer.recipes.parts.baselines import attention_layers, check_heads, init_std, stack
from manyformer.recipes.parts.keywords import NodeFeatureCount, PositiveSize
from manyformer.recipes.parts.registry import recipe

PAPER = "Ying et al. 2021, Do Transformers Really Perform Bad for Graph Representation?, arXiv:2106.05234"
COST = "O(n^2 d + n d^2) per layer and O(n e m) in all, for n nodes, e edges and paths of up to m edges"

MaxDegree = Annotated[PositiveSize, "largest degree with a vector of its own"]
MaxDistance = Annotated[PositiveSize, "longest shortest path with a score of its own, in edges"]


@recipe(
    "Graphormer",
    paper=PAPER,
    summary="All nodes attend to each other, with scores by the shortest path between them; a label for each node.",
    task=GRAPH_NODES,
    family="graph",
    cost=COST,
    reasons={"one_graph": "nodes and edges decide the shapes"},
    tiny_keywords={"features": 6, "max_distance": 3},
)
def graphormer(
    features: NodeFeatureCount = 1433,
    classes: int = 7,
    *,
    edge_features: EdgeFeatureCount = 0,
    dim: int = 64,
    depth: int = 4,
    heads: int = 8,
    ff_dim: int | None = None,
    max_degree: MaxDegree = 64,
    max_distance: MaxDistance = 8,
    dropout: float = 0.1,
) -> NodeClassifier:
    """Section 3.2: pre-norm with GELU, and feed-forward layers as wide as the model. The paper labels whole graphs.

    Without its virtual node, as a row may hold several graphs; `graphormer-classifier` has it, for whole graphs."""
    encoding = GraphormerEncoding(
        dim, heads, max_degree=max_degree, max_distance=max_distance, edge_features=edge_features, virtual_node=False
    )
    embed, body, head = _parts(features, classes, dim, depth, heads, ff_dim, dropout)
    return NodeClassifier(embed, body, head, self_loops=False, edge_features=edge_features, encoding=encoding)


@recipe(
    "Graphormer, whole graphs",
    paper=PAPER,
    summary="All nodes and a virtual one attend to each other, with scores by shortest paths; a label for each graph.",
    task=WHOLE_GRAPHS,
    family="graph",
    cost=COST,
    reasons={"one_graph": "nodes and edges decide the shapes"},
    tiny_keywords={"features": 6, "max_distance": 3, "edge_features": 2},
)
def graphormer_classifier(
    features: NodeFeatureCount = 16,
    classes: int = 2,
    *,
    edge_features: EdgeFeatureCount = 0,
    dim: int = 80,
    depth: int = 12,
    heads: int = 8,
    ff_dim: int | None = None,
    max_degree: MaxDegree = 64,
    max_distance: MaxDistance = 8,
    dropout: float = 0.1,
) -> GraphClassifier:
    """`graphormer` with the virtual node, from which the label is read; the sizes of Graphormer-slim by default."""
    encoding = GraphormerEncoding(
        dim, heads, max_degree=max_degree, max_distance=max_distance, edge_features=edge_features, virtual_node=True
    )
    embed, body, head = _parts(features, classes, dim, depth, heads, ff_dim, dropout)
    return GraphClassifier(embed, body, head, self_loops=False, edge_features=edge_features, encoding=encoding)


def _parts(
    features: int, classes: int, dim: int, depth: int, heads: int, ff_dim: int | None, dropout: float
) -> tuple[FeatureEmbedding, Layer, ClassHead]:
    check_heads(dim, heads)
    embed = FeatureEmbedding(features, dim, dropout=dropout, bias=True)
    # feed-forward layers as wide as the stream, as in the paper's table of hyperparameters
    width = dim if ff_dim is None else ff_dim
    # all layers add the same table of biases, by the length of the shortest path (equation 6)
    layer = attention_layers(dim, heads, width, lambda number: SoftmaxKernel(), position=GraphPairPosition(heads))
    body = stack(depth, layer, order="pre", norm=partial(nn.LayerNorm, dim), dropout=dropout, std=init_std(dim))
    return embed, body, ClassHead(dim, classes, bias=True)
