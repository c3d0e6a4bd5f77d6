"""Models of graphs: features of nodes, a layer that reads edges, a head that labels each node or each graph."""

from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from manyformer.base.errors import UserError
from manyformer.models.embedding import positions_of
from manyformer.models.encoder_model import select_targets
from manyformer.models.graph_embedding import (
    EdgePlaces,
    FeatureEmbedding,
    GraphormerEncoding,
    LaplacianEmbedding,
    sort_edges,
)
from manyformer.models.head import OutputHead, apply_head
from manyformer.models.model import Model, ModelOutput
from manyformer.nn.batches import GraphBatch
from manyformer.nn.core import (
    PADDING_SEGMENT,
    Context,
    Layer,
    LayerOutput,
    MakesStream,
    State,
    WatchFn,
    WeightAxes,
    apply_layer,
    no_watch,
)


class GraphEncoder(Model[GraphBatch], MakesStream):
    """An embedding of the nodes' features, a layer and a head; subclasses define what the head predicts.

    With `self_loops` every node has an edge to itself. `edge_features` is the number of features of an edge, 0 for
    none, `positions` embeds Laplacian positions, which are added to the embedded features, and `encoding` adds degrees
    and gives pairs of nodes scores."""

    def __init__(
        self,
        embed: FeatureEmbedding,
        body: Layer,
        head: OutputHead,
        *,
        self_loops: bool,
        edge_features: int = 0,
        positions: LaplacianEmbedding | None = None,
        encoding: GraphormerEncoding | None = None,
    ) -> None:
        super().__init__()
        self.embed = embed
        self.body = body
        self.head = head
        self.positions = positions
        self.encoding = encoding
        self.self_loops = self_loops
        self.edge_features = edge_features

    def forward(
        self,
        features: Float[Tensor, "b l k"],
        edges: Int[Tensor, "b m 2"],
        segments: Int[Tensor, "b l"] | None = None,
        columns: Int[Tensor, "b l k"] | None = None,
        edge_features: Float[Tensor, "b m f"] | None = None,
        eigenvectors: Float[Tensor, "b l p"] | None = None,
        *,
        watch: WatchFn = no_watch,
    ) -> ModelOutput:
        """The logits of graphs whose edges are given as columns (source, target) of each row, -1 for padding.

        `segments` numbers the graphs of each row, -1 is no node; None means that each row is one graph. `columns` are
        those of sparse features, None means that `features` has all columns. Raises UserError for inputs that the model
        does not read or needs."""
        # targets of length zero: only the loss and the score read them
        batch = GraphBatch(features, edges, edges[:, :0, 0], segments, columns, edge_features, eigenvectors)
        hidden = self.encode(batch, watch)
        return ModelOutput(apply_head(self.head, hidden.y), None, hidden.loss)

    def encode(self, batch: GraphBatch, watch: WatchFn = no_watch) -> LayerOutput:
        """What the head reads."""
        laplacian = 0
        if self.positions is not None:
            laplacian = self.positions.count
        _check_width(batch.edge_features, self.edge_features, "edge_features")
        _check_width(batch.eigenvectors, laplacian, "laplacian")
        nodes = torch.zeros(batch.features.shape[:2], dtype=torch.long, device=batch.features.device)
        positions, _ = positions_of(nodes, batch.segments, None, batch.layout)
        segments = positions.segment_ids
        places = None
        if batch.links is not None and batch.loops is not None:
            places = EdgePlaces(batch.links, batch.loops)
        edges = sort_edges(batch.edges, segments, batch.edge_features, self_loops=self.self_loops, places=places)
        # edges travel with the positions of nodes, so that layers need no argument of their own for graphs
        ctx = Context(positions._replace(edges=edges), watch=watch)
        x = self.embed(batch.features, batch.columns)
        if self.positions is not None:
            x = x + self.positions(batch.eigenvectors)
        if self.encoding is not None:
            x, ctx = self.encoding(x, ctx)
        return apply_layer(self.body, x, ctx)

    def outer_axes(self, axes: WeightAxes) -> WeightAxes:
        has_virtual_node = self.encoding is not None and self.encoding.virtual_node is not None
        if has_virtual_node:
            return axes.with_summaries()
        return axes


@final
class NodeClassifier(GraphEncoder):
    """Labels each node; logits are (b, l, classes)."""

    def head_inputs(self, batch: GraphBatch, state: State) -> tuple[LayerOutput, Tensor]:
        return select_targets(self.encode(batch), batch.targets, batch.scored)


@final
class GraphClassifier(GraphEncoder):
    """Classifies each row, which is one graph, from its virtual node or the mean over its nodes.

    Logits are (b, classes)."""

    def encode(self, batch: GraphBatch, watch: WatchFn = no_watch) -> LayerOutput:
        hidden = super().encode(batch, watch)
        if self.encoding is not None and self.encoding.virtual_node is not None:
            # the encoding has put the virtual node before all others
            return LayerOutput(hidden.y[:, 0], hidden.state, hidden.loss)
        if batch.segments is None:
            # a row without nodes has the mean zero instead of NaN
            return LayerOutput(hidden.y.sum(1) / max(1, hidden.y.shape[1]), hidden.state, hidden.loss)
        is_node = (batch.segments != PADDING_SEGMENT)[..., None]
        means = (hidden.y * is_node).sum(1) / is_node.sum(1).clamp(min=1)
        return LayerOutput(means, hidden.state, hidden.loss)

    def head_inputs(self, batch: GraphBatch, state: State) -> tuple[LayerOutput, Tensor]:
        return self.encode(batch), batch.targets


def _check_width(numbers: Tensor | None, width: int, keyword: str) -> None:
    """Raise UserError if the last axis is not that of the keyword; None has the width 0."""
    actual = 0 if numbers is None else numbers.shape[-1]
    if actual != width:
        raise UserError(f"this model was built with {keyword}={width}, and is given {actual} numbers of that kind")
