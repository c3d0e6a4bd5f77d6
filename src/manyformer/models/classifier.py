"""An encoder that gives a whole sequence one label."""

from typing import final

from jaxtyping import Float, Int
from torch import Tensor

from manyformer.batches import Batch, LabelBatch
from manyformer.core import PADDING, Out, Place, Watch, ignore
from manyformer.models.base import Loss, ModelOut, Score
from manyformer.models.encoder import Encoder


@final
class Classifier(Encoder):
    """One label a row, from the mean over its tokens, padding left out; logits are (b, classes)."""

    def forward(
        self, tokens: Int[Tensor, "b l"], segments: Int[Tensor, "b l"] | None = None, *, watch: Watch = ignore
    ) -> ModelOut:
        pooled = self._pooled(tokens, segments, watch)
        return ModelOut(self.head(pooled.y), None, pooled.loss)

    def loss(self, batch: Batch, *, smoothing: float = 0.0) -> Loss:
        assert isinstance(batch, LabelBatch)
        pooled = self._pooled(batch.tokens, batch.segments, ignore)
        return self.head.loss(pooled.y, batch.labels, smoothing=smoothing)._replace(extra=pooled.loss)

    def score(self, batch: Batch) -> Score:
        assert isinstance(batch, LabelBatch)
        return self.head.score(self._pooled(batch.tokens, batch.segments, ignore).y, batch.labels)

    def _pooled(self, tokens: Tensor, segments: Tensor | None, watch: Watch) -> Out:
        place = self._place(tokens, segments)
        hidden = self._hidden(tokens, place, watch)
        return Out(mean_over_tokens(hidden.y, place), None, hidden.loss)


def mean_over_tokens(x: Float[Tensor, "b l d"], place: Place) -> Float[Tensor, "b d"]:
    """The mean of each row's real tokens; zero where there is none."""
    real = (place.seg != PADDING)[..., None]
    return (x * real).sum(1) / real.sum(1).clamp(min=1)
