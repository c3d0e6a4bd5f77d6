"""A model that assigns a label to each node of a graph."""

from typing import final

from torch import Tensor

from manyformer.batches import GraphBatch
from manyformer.core import LayerOutput, State
from manyformer.models.encoder_model import select_targets
from manyformer.models.graph_encoder import GraphEncoder


@final
class NodeClassifier(GraphEncoder):
    """Labels each node; logits are (b, l, classes)."""

    def head_inputs(self, batch: GraphBatch, state: State) -> tuple[LayerOutput, Tensor]:
        return select_targets(self.encode(batch), batch.targets, batch.scored)
