"""A model that assigns a label to each graph."""

from typing import final

from torch import Tensor

from manyformer.batches import GraphBatch
from manyformer.core import PADDING_SEGMENT, LayerOutput, State, WatchFn, no_watch
from manyformer.models.graph_encoder import GraphEncoder


@final
class GraphClassifier(GraphEncoder):
    """Classifies each row, which is one graph, from its virtual node or the mean over its nodes.

    Logits are (b, classes)."""

    def encode(self, batch: GraphBatch, watch: WatchFn = no_watch) -> LayerOutput:
        hidden = super().encode(batch, watch)
        if self.encoding is not None and self.encoding.virtual_node is not None:
            return LayerOutput(hidden.y[:, 0], hidden.state, hidden.loss)
        if batch.segments is None:
            return LayerOutput(hidden.y.sum(1) / max(1, hidden.y.shape[1]), hidden.state, hidden.loss)
        is_node = (batch.segments != PADDING_SEGMENT)[..., None]
        means = (hidden.y * is_node).sum(1) / is_node.sum(1).clamp(min=1)
        return LayerOutput(means, hidden.state, hidden.loss)

    def head_inputs(self, batch: GraphBatch, state: State) -> tuple[LayerOutput, Tensor]:
        return self.encode(batch), batch.targets
