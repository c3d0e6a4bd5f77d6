"""A model that assigns a label to each example of several parts."""

from typing import final

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from manyformer.batches import ModalitiesBatch
from manyformer.core import LayerOutput, State, WatchFn, no_watch
from manyformer.mixers.modality_fusion import Fusion, has_tokens
from manyformer.models.classifier import mean_over_tokens
from manyformer.models.head import ClassHead
from manyformer.models.model import Model, ModelOutput
from manyformer.models.part_embedding import PartEmbedding, batch_of_parts
from manyformer.models.token_inputs import apply_head


@final
class MultimodalClassifier(Model[ModalitiesBatch]):
    """Classifies examples by the mean of the parts that each has, a part being the mean of its tokens after fusion."""

    def __init__(self, embed: PartEmbedding, fusion: Fusion, head: ClassHead) -> None:
        super().__init__()
        self.embed, self.fusion, self.head = embed, fusion, head

    def forward(
        self,
        images: UInt8[Tensor, "b height width channels"] | None = None,
        frames: Float[Tensor, "b f m"] | None = None,
        tokens: Int[Tensor, "b t"] | None = None,
        image_segments: Int[Tensor, " b"] | None = None,
        frame_segments: Int[Tensor, "b f"] | None = None,
        token_segments: Int[Tensor, "b t"] | None = None,
        *,
        watch: WatchFn = no_watch,
    ) -> ModelOutput:
        """The logits (b, classes) of examples, of whose parts one at least is given; segments of -1 are padding."""
        batch = batch_of_parts(images, frames, tokens, image_segments, frame_segments, token_segments)
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
