"""An encoder that assigns one label to each recording."""

from typing import final

from jaxtyping import Float, Int
from torch import Tensor

from manyformer.batches import AudioClassificationBatch
from manyformer.core import Context, Layer, LayerOutput, State, WatchFn, apply_layer, no_watch
from manyformer.models.classifier import mean_over_tokens
from manyformer.models.frame_embedding import FrameEmbedding
from manyformer.models.head import ClassHead
from manyformer.models.model import Model, ModelOutput, apply_head, max_length_of
from manyformer.models.temporal_res_net import TemporalResNet


@final
class AudioClassifier(Model[AudioClassificationBatch]):
    """Classifies recordings by the mean over their embedded frames without padding; logits are (b, classes)."""

    def __init__(self, embed: FrameEmbedding | TemporalResNet, body: Layer, head: ClassHead) -> None:
        super().__init__()
        self.embed = embed
        self.body = body
        self.head = head
        self.max_length = embed.max_length
        self._max_tokens = max_length_of(body)

    def forward(
        self, features: Float[Tensor, "b f m"], segments: Int[Tensor, "b f"] | None = None, *, watch: WatchFn = no_watch
    ) -> ModelOutput:
        pooled = self._pool(features, segments, watch)
        return ModelOutput(apply_head(self.head, pooled.y), None, pooled.loss)

    def head_inputs(self, batch: AudioClassificationBatch, state: State) -> tuple[LayerOutput, Tensor]:
        return self._pool(batch.features, batch.segments, no_watch), batch.labels

    def _pool(self, features: Tensor, segments: Tensor | None, watch: WatchFn) -> LayerOutput:
        x, positions = self.embed.read_source(features, segments)
        hidden = apply_layer(self.body, x, Context(positions, watch=watch))
        return LayerOutput(mean_over_tokens(hidden.y, positions), None, hidden.loss)
