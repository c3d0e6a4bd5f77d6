"""An encoder that assigns one label to each sequence."""

from typing import final

from jaxtyping import Float, Int
from torch import Tensor

from manyformer.batches import ClassificationBatch
from manyformer.core import PADDING_SEGMENT, LayerOutput, State, TokenPositions, WatchFn, no_watch
from manyformer.models.encoder_model import EncoderModel
from manyformer.models.model import ModelOutput
from manyformer.models.token_inputs import apply_head


@final
class TextClassifier(EncoderModel[ClassificationBatch]):
    """Classifies each row from the mean over its tokens without padding; logits are (b, classes)."""

    def forward(
        self, tokens: Int[Tensor, "b l"], segments: Int[Tensor, "b l"] | None = None, *, watch: WatchFn = no_watch
    ) -> ModelOutput:
        pooled = self._pool(tokens, segments, watch)
        return ModelOutput(apply_head(self.head, pooled.y), None, pooled.loss)

    def head_inputs(self, batch: ClassificationBatch, state: State) -> tuple[LayerOutput, Tensor]:
        return self._pool(batch.tokens, batch.segments, no_watch), batch.labels

    def _pool(self, tokens: Tensor, segments: Tensor | None, watch: WatchFn) -> LayerOutput:
        positions = self._token_positions(tokens, segments)
        hidden = self._encode(tokens, positions, watch)
        return LayerOutput(mean_over_tokens(hidden.y, positions), None, hidden.loss)


def mean_over_tokens(x: Float[Tensor, "b l d"], positions: TokenPositions) -> Float[Tensor, "b d"]:
    """The mean over the tokens of each row without padding; zero for rows of padding only."""
    valid = (positions.segment_ids != PADDING_SEGMENT)[..., None]
    return (x * valid).sum(1) / valid.sum(1).clamp(min=1)
