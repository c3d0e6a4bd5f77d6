"""A text encoder that predicts a number, and its batches."""

from typing import NamedTuple, Self, final

import torch
from torch import Tensor

from manyformer.models import BatchLoss, BatchScore, EncoderModel, ModelOutput
from manyformer.models.encoder_model import mean_over_tokens
from manyformer.nn.core import PADDING_SEGMENT, LayerOutput, State, WatchFn, no_watch


class RegressionBatch(NamedTuple):
    """Texts, and a number for each; NaN is ignored."""

    tokens: Tensor
    numbers: Tensor
    segments: Tensor | None = None

    def target_count(self) -> int:
        return int((~self.numbers.isnan()).sum())

    def token_count(self) -> int:
        return self.tokens.numel() if self.segments is None else int((self.segments != PADDING_SEGMENT).sum())

    def ignored(self) -> Self:
        return self._replace(numbers=torch.full_like(self.numbers, torch.nan))


@final
class TextRegressor(EncoderModel[RegressionBatch]):
    """Predicts a number from the mean over the tokens of a row; the output has shape (b, 1)."""

    def forward(self, tokens: Tensor, segments: Tensor | None = None, *, watch: WatchFn = no_watch) -> ModelOutput:
        pooled = self._pool(tokens, segments, watch)
        return ModelOutput(self.head(pooled.y), None, pooled.loss)

    def loss(self, batch: RegressionBatch, *, label_smoothing: float = 0.0, state: State = None) -> BatchLoss:
        pooled = self._pool(batch.tokens, batch.segments, no_watch)
        errors = squared_errors(self.head(pooled.y), batch.numbers)
        return BatchLoss(errors.sum(), torch.tensor(batch.target_count()), pooled.loss)

    def score(self, batch: RegressionBatch, *, state: State = None) -> BatchScore:
        errors = squared_errors(self(batch.tokens, batch.segments).logits, batch.numbers)
        sums = {"absolute_error": errors.sqrt().sum()}
        return BatchScore(errors.sum(), torch.tensor(batch.target_count()), torch.tensor(0), others=sums)

    def _pool(self, tokens: Tensor, segments: Tensor | None, watch: WatchFn) -> LayerOutput:
        positions = self._token_positions(tokens, segments)
        hidden = self._encode(tokens, positions, watch)
        return LayerOutput(mean_over_tokens(hidden.y, positions), None, hidden.loss)


def squared_errors(outputs: Tensor, numbers: Tensor) -> Tensor:
    """The squared error of each row that has a number, in float32."""
    has_number = ~numbers.isnan()
    return (outputs[:, 0].float() - numbers)[has_number].square()
