"""The graph convolution: a sum over neighbours with weights that follow from degrees."""

from typing import final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from manyformer.core import Context, Layer, LayerOutput, State
from manyformer.mixers.graph_attention import edges_of
from manyformer.ops.edge_attention import sum_over_edges


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
