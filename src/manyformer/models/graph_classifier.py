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
            return hidden._replace(y=hidden.y[:, 0])
        if batch.segments is None:
            return hidden._replace(y=hidden.y.sum(1) / max(1, hidden.y.shape[1]))
        is_node = (batch.segments != PADDING_SEGMENT)[..., None]
        return hidden._replace(y=(hidden.y * is_node).sum(1) / is_node.sum(1).clamp(min=1))

    def head_inputs(self, batch: GraphBatch, state: State) -> tuple[LayerOutput, Tensor]:
        return self.encode(batch), batch.targets
