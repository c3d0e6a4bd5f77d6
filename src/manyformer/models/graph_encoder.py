"""The base class of models of graphs: features of nodes, a layer that reads edges, a head."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from manyformer.batches import GraphBatch
from manyformer.core import Context, Layer, LayerOutput, WatchFn, no_watch
from manyformer.models.feature_embedding import FeatureEmbedding
from manyformer.models.graph_edges import sort_edges
from manyformer.models.model import Model, ModelOutput
from manyformer.models.output_head import OutputHead
from manyformer.models.token_inputs import apply_head, apply_layer
from manyformer.models.token_positions import positions_of


class GraphEncoder(Model[GraphBatch]):
    """An embedding of the nodes' features, a layer and a head; subclasses define what the head predicts.

    With `self_loops` every node has an edge to itself."""

    def __init__(self, embed: FeatureEmbedding, body: Layer, head: OutputHead, *, self_loops: bool) -> None:
        super().__init__()
        self.embed, self.body, self.head, self.self_loops = embed, body, head, self_loops

    def forward(
        self,
        features: Float[Tensor, "b l k"],
        edges: Int[Tensor, "b m 2"],
        segments: Int[Tensor, "b l"] | None = None,
        columns: Int[Tensor, "b l k"] | None = None,
        edge_features: Float[Tensor, "b m f"] | None = None,
        *,
        watch: WatchFn = no_watch,
    ) -> ModelOutput:
        """The logits of graphs whose edges are given as columns (source, target) of each row, -1 for padding.

        `segments` numbers the graphs of each row, -1 is no node; None means that each row is one graph. `columns` are
        those of sparse features, None means that `features` has all columns."""
        batch = GraphBatch(features, edges, edges[:, :0, 0], segments, columns, edge_features)
        hidden = self.encode(batch, watch)
        return ModelOutput(apply_head(self.head, hidden.y), None, hidden.loss)

    def encode(self, batch: GraphBatch, watch: WatchFn = no_watch) -> LayerOutput:
        """What the head reads."""
        nodes = torch.zeros(batch.features.shape[:2], dtype=torch.long, device=batch.features.device)
        positions, _ = positions_of(nodes, batch.segments, None)
        segments = positions.segment_ids
        edges = sort_edges(batch.edges, segments, batch.edge_features, self_loops=self.self_loops)
        ctx = Context(positions._replace(edges=edges), watch=watch)
        return apply_layer(self.body, self.embed(batch.features, batch.columns), ctx)
