"""The graph convolutional network: a mean over neighbors, to compare attention with."""

from torch import nn

from manyformer.models import NodeClassifier
from manyformer.models.graph_embedding import FeatureEmbedding
from manyformer.models.head import LogitsHead
from manyformer.models.tasks.graph_labels import GRAPH_NODES
from manyformer.nn.core import Chain, Layer, Pointwise
from manyformer.nn.graphs import GraphConvolution
from manyformer.nn.runtime.dropout import Dropout
from manyformer.recipes.parts.keywords import NodeFeatureCount
from manyformer.recipes.parts.registry import recipe


@recipe(
    "GCN",
    paper="Kipf and Welling 2017, Semi-Supervised Classification with Graph Convolutional Networks, arXiv:1609.02907",
    summary="Each node becomes a sum over its neighbours with weights by their degrees, without attention.",
    task=GRAPH_NODES,
    family="graph",
    cost="O(n d^2 + e d) per layer for n nodes and e edges",
    reasons={
        "heads": "weights of neighbours follow from the graph",
        "one_graph": "nodes and edges decide the shapes",
    },
    tiny_keywords={"features": 6},
)
def gcn(
    features: NodeFeatureCount = 1433,
    classes: int = 7,
    *,
    dim: int = 16,
    depth: int = 2,
    dropout: float = 0.5,
) -> NodeClassifier:
    """Layers of graph convolutions with ReLU between them, over neighbors and the node itself; section 3.1.

    `dropout` is that of the inputs of each layer."""
    widths = [dim] * (depth - 1) + [classes]
    layers: dict[str, Layer] = {"convolution_0": GraphConvolution(widths[0])}
    for number, width in enumerate(widths[1:], 1):
        projection = nn.Linear(dim, width, bias=False)
        # Glorot's initialization, as the authors have it
        nn.init.xavier_uniform_(projection.weight)
        layers[f"projection_{number}"] = Pointwise(nn.Sequential(nn.ReLU(), Dropout(dropout), projection))
        layers[f"convolution_{number}"] = GraphConvolution(width)
    # A (X W): features are projected before they are summed over edges, which is cheaper as W narrows them
    embed = FeatureEmbedding(features, widths[0], dropout=dropout)
    return NodeClassifier(embed, Chain(**layers), LogitsHead(classes), self_loops=True)
