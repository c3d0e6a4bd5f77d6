"""An encoder that gives a whole sequence one label."""

from typing import final

from jaxtyping import Float, Int
from torch import Tensor

from manyformer.batches import Batch, ClassificationBatch
from manyformer.core import PADDING_SEGMENT, LayerOutput, TokenPositions, WatchFn, no_watch
from manyformer.models.encoder_model import EncoderModel
from manyformer.models.model import BatchLoss, BatchScore, ModelOutput


@final
class TextClassifier(EncoderModel):
    """One label a row, from the mean over its tokens, padding left out; logits are (b, classes)."""

    def forward(
        self, tokens: Int[Tensor, "b l"], segments: Int[Tensor, "b l"] | None = None, *, watch: WatchFn = no_watch
    ) -> ModelOutput:
        pooled = self._pooled(tokens, segments, watch)
        return ModelOutput(self.head(pooled.y), None, pooled.loss)

    def loss(self, batch: Batch, *, smoothing: float = 0.0) -> BatchLoss:
        assert isinstance(batch, ClassificationBatch)
        pooled = self._pooled(batch.tokens, batch.segments, no_watch)
        return self.head.loss(pooled.y, batch.labels, smoothing=smoothing)._replace(extra=pooled.loss)

    def score(self, batch: Batch) -> BatchScore:
        assert isinstance(batch, ClassificationBatch)
        return self.head.score(self._pooled(batch.tokens, batch.segments, no_watch).y, batch.labels)

    def _pooled(self, tokens: Tensor, segments: Tensor | None, watch: WatchFn) -> LayerOutput:
        place = self._place(tokens, segments)
        hidden = self._hidden(tokens, place, watch)
        return LayerOutput(mean_over_tokens(hidden.y, place), None, hidden.loss)


def mean_over_tokens(x: Float[Tensor, "b l d"], positions: TokenPositions) -> Float[Tensor, "b d"]:
    """The mean of each row's real tokens; zero where there is none."""
    real = (positions.segment_ids != PADDING_SEGMENT)[..., None]
    return (x * real).sum(1) / real.sum(1).clamp(min=1)
