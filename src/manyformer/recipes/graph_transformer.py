"""The Graph Transformer: attention among neighbors, Laplacian positions, features of edges."""

from typing import Annotated

from annotated_types import Ge

from manyformer.models import ClassHead, GraphClassifier, NodeClassifier
from manyformer.models.graph_embedding import FeatureEmbedding, LaplacianEmbedding
from manyformer.models.tasks.graph_labels import GRAPH_NODES, WHOLE_GRAPHS
from manyformer.nn.core import Layer
from manyformer.nn.graphs import GraphTransformerStack
from manyformer.recipes.parts.baselines import check_heads
from manyformer.recipes.parts.keywords import NodeFeatureCount
from manyformer.recipes.parts.registry import recipe

PAPER = "Dwivedi and Bresson 2021, A Generalization of Transformer Networks to Graphs, arXiv:2012.09699"
COST = "O(n d^2 + e d) per layer for n nodes and e edges without features, else O((n + e) d^2)"

EdgeFeatureCount = Annotated[int, Ge(0), "number of features of an edge; the data decides it in a run"]
EigenvectorCount = Annotated[
    int, Ge(0), "number of eigenvectors of the Laplacian that are a node's position; the data decides it in a run"
]
REASONS = {
    "heads": "heads attend along edges, in a layer without gates of heads",
    "attention_dropout": "weights belong to edges, not to pairs of tokens",
    "one_graph": "nodes and edges decide the shapes",
}


@recipe(
    "Graph Transformer",
    paper=PAPER,
    summary="Nodes attend to their neighbours, with Laplacian positions and features of edges; a label for each node.",
    task=GRAPH_NODES,
    family="graph",
    cost=COST,
    reasons=REASONS,
    tiny_keywords={"features": 6, "laplacian": 3},
)
def graph_transformer(
    features: NodeFeatureCount = 1433,
    classes: int = 7,
    *,
    edge_features: EdgeFeatureCount = 0,
    laplacian: EigenvectorCount = 0,
    dim: int = 64,
    depth: int = 4,
    heads: int = 8,
    ff_dim: int | None = None,
    dropout: float = 0.0,
) -> NodeClassifier:
    """Section 2, with layer norm; the paper compares it with batch norm, which joins the rows of a batch.

    The features of nodes have the dropout of the layers. The last layer does not update edges, which nothing reads."""
    embed = FeatureEmbedding(features, dim, dropout=dropout, bias=True)
    body = _layers(depth, dim, heads, edge_features, ff_dim, dropout)
    positions = None
    if laplacian:
        positions = LaplacianEmbedding(laplacian, dim)
    head = ClassHead(dim, classes, bias=True)
    return NodeClassifier(embed, body, head, self_loops=False, edge_features=edge_features, positions=positions)


@recipe(
    "Graph Transformer, whole graphs",
    paper=PAPER,
    summary="Nodes attend to their neighbours, with Laplacian positions and features of edges; a label for each graph.",
    task=WHOLE_GRAPHS,
    family="graph",
    cost=COST,
    reasons=REASONS,
    tiny_keywords={"features": 6, "laplacian": 3, "edge_features": 2},
)
def graph_transformer_classifier(
    features: NodeFeatureCount = 16,
    classes: int = 2,
    *,
    edge_features: EdgeFeatureCount = 0,
    laplacian: EigenvectorCount = 0,
    dim: int = 64,
    depth: int = 4,
    heads: int = 8,
    ff_dim: int | None = None,
    dropout: float = 0.0,
) -> GraphClassifier:
    """`graph-transformer` with one projection of the mean over nodes; the paper has three layers there."""
    embed = FeatureEmbedding(features, dim, dropout=dropout, bias=True)
    body = _layers(depth, dim, heads, edge_features, ff_dim, dropout)
    positions = None
    if laplacian:
        positions = LaplacianEmbedding(laplacian, dim)
    head = ClassHead(dim, classes, bias=True)
    return GraphClassifier(embed, body, head, self_loops=False, edge_features=edge_features, positions=positions)


def _layers(depth: int, dim: int, heads: int, edge_features: int, ff_dim: int | None, dropout: float) -> Layer:
    check_heads(dim, heads)
    # the authors' code doubles the width in feed-forward layers, where text models take four times it
    width = 2 * dim if ff_dim is None else ff_dim
    # edges have a stream of their own from layer to layer, next to that of nodes
    return GraphTransformerStack(depth, dim, heads, edge_features=edge_features, ff_dim=width, dropout=dropout)
