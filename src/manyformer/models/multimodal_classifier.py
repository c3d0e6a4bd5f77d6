"""A model that assigns a label to each example of several parts."""

from typing import final

import torch
from torch import Tensor

from manyformer.batches import ModalitiesBatch
from manyformer.core import LayerOutput, State, WatchFn, no_watch
from manyformer.mixers.modality_fusion import Fusion, has_tokens
from manyformer.models.classifier import mean_over_tokens
from manyformer.models.head import ClassHead
from manyformer.models.modalities_model import ModalitiesModel
from manyformer.models.model import ModelOutput, apply_head
from manyformer.models.part_embedding import PartEmbedding


@final
class MultimodalClassifier(ModalitiesModel):
    """Classifies examples by the mean of the parts that each has, a part being the mean of its tokens after fusion."""

    def __init__(self, embed: PartEmbedding, fusion: Fusion, head: ClassHead) -> None:
        super().__init__()
        self.embed = embed
        self.fusion = fusion
        self.head = head

    def output(self, batch: ModalitiesBatch, watch: WatchFn) -> ModelOutput:
        """The logits (b, classes) of examples."""
        hidden = self._pool(batch, watch)
        return ModelOutput(apply_head(self.head, hidden.y), None, hidden.loss)

    def head_inputs(self, batch: ModalitiesBatch, state: State) -> tuple[LayerOutput, Tensor]:
        return self._pool(batch, no_watch), batch.labels

    def _pool(self, batch: ModalitiesBatch, watch: WatchFn) -> LayerOutput:
        sequences = self.embed(batch)
        outputs = self.fusion(sequences, watch)
        means = torch.stack([mean_over_tokens(outputs[name].y, part.positions) for name, part in sequences.items()])
        present = torch.stack([has_tokens(part.positions) for part in sequences.values()])[..., None]
        pooled = (means * present).sum(0) / present.sum(0).clamp(min=1)
        loss: Tensor | float = sum((output.loss for output in outputs.values()), 0.0)
        return LayerOutput(pooled, None, loss)
