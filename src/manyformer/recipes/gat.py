"""The graph attention network: each node attends to its neighbors with additive scores."""

from typing import Annotated, Literal

from torch import nn

from manyformer.models import NodeClassifier
from manyformer.models.graph_embedding import FeatureEmbedding
from manyformer.models.head import LogitsHead
from manyformer.models.tasks.graph_labels import GRAPH_NODES
from manyformer.nn.core import Chain, Layer, Pointwise
from manyformer.nn.graphs import AdditiveScores, DynamicScores, GraphAttention, HeadMerge
from manyformer.nn.runtime.dropout import Dropout
from manyformer.recipes.parts.baselines import check_heads
from manyformer.recipes.parts.keywords import NodeFeatureCount, PositiveSize
from manyformer.recipes.parts.registry import recipe

SCORES = {"additive": AdditiveScores, "dynamic": DynamicScores}


@recipe(
    "GAT",
    paper="Velickovic et al. 2018, Graph Attention Networks, arXiv:1710.10903",
    summary="Each node of a graph attends to its neighbours, with scores that are sums of a number of either.",
    task=GRAPH_NODES,
    family="graph",
    cost="O(n d^2 + e d) per layer for n nodes and e edges",
    reasons={
        "heads": "no output projection joins its heads",
        "attention_dropout": "weights belong to edges, not to pairs of tokens",
        "one_graph": "nodes and edges decide the shapes",
    },
    tiny_keywords={"features": 6},
)
def gat(
    features: NodeFeatureCount = 1433,
    classes: int = 7,
    *,
    dim: int = 64,
    depth: int = 2,
    heads: int = 8,
    output_heads: Annotated[PositiveSize, "number of heads of the last layer, which are averaged"] = 1,
    scores: Annotated[
        Literal["additive", "dynamic"],
        "scores of edges: GAT's, or those of GATv2, whose order of a node's neighbours depends on the node",
    ] = "additive",
    dropout: float = 0.6,
) -> NodeClassifier:
    """Layers of additive attention among neighbors and the node itself, with ELU between them and no residual sums.

    Sections 2.1 and 3.3: the transductive model of two layers. `dropout` is that of the inputs of each layer, of the
    attention weights and, as in the released code, of the values. `scores="dynamic"` is GATv2 (Brody et al. 2022,
    arXiv:2105.14491), whose nodes have different projections as source and as target."""
    check_heads(dim, heads)
    kind = SCORES[scores]
    shapes = [(heads, dim // heads)] * (depth - 1) + [(output_heads, classes)]
    # a layer is a projection followed by attention among its outputs; the first projection is the embedding
    widths = [count * kind.projections * head_dim for count, head_dim in shapes]
    layers: dict[str, Layer] = {}
    for number, (count, head_dim) in enumerate(shapes):
        if number:
            projection = nn.Linear(dim, widths[number], bias=False)
            nn.init.xavier_uniform_(projection.weight)
            layers[f"projection_{number}"] = Pointwise(nn.Sequential(nn.ELU(), Dropout(dropout), projection))
        # heads of the last layer are averaged, because each has one channel for each class (equation 6)
        merge: HeadMerge = "mean" if number == depth - 1 else "concat"
        attention = GraphAttention(count, head_dim, kind(count, head_dim), merge=merge, dropout=dropout)
        layers[f"attention_{number}"] = attention
    embed = FeatureEmbedding(features, widths[0], dropout=dropout)
    return NodeClassifier(embed, Chain(**layers), LogitsHead(classes), self_loops=True)
