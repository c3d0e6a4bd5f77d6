"""An encoder that assigns one label to each sequence."""

from collections.abc import Callable
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from manyformer.batches import ClassificationBatch
from manyformer.core import PADDING_SEGMENT, Layer, LayerOutput, State, TokenPositions, WatchFn, no_watch
from manyformer.models.embedding import TokenEmbedding
from manyformer.models.encoder_model import TextEncoderModel
from manyformer.models.head import ClassHead

TokenPooling = Callable[[Float[Tensor, "b l d"], TokenPositions], Float[Tensor, "b d"]]
"""Makes one vector of the tokens of a row."""


def mean_over_tokens(x: Float[Tensor, "b l d"], positions: TokenPositions) -> Float[Tensor, "b d"]:
    """The mean over the tokens of each row without padding; zero for rows of padding only."""
    valid = (positions.segment_ids != PADDING_SEGMENT)[..., None]
    # padding may hold any number, NaN too
    return x.masked_fill(~valid, 0).sum(1) / valid.sum(1).clamp(min=1)


def first_token(x: Float[Tensor, "b l d"], positions: TokenPositions) -> Float[Tensor, "b d"]:
    """The first token of each row that is not padding; zero for rows of padding only."""
    valid = positions.segment_ids != PADDING_SEGMENT
    rows = torch.arange(len(x), device=x.device)
    return x[rows, valid.int().argmax(1)].masked_fill(~valid.any(1, keepdim=True), 0)


@final
class TextClassifier(TextEncoderModel[ClassificationBatch]):
    """Classifies each row from one vector, that `pool` makes of its tokens; logits are (b, classes).

    `roles` and `parts` are as of `MaskedLM`."""

    def __init__(
        self, embed: TokenEmbedding, body: Layer, head: ClassHead, *, pool: TokenPooling = mean_over_tokens
    ) -> None:
        super().__init__(embed, body, head)
        self.pool = pool

    def head_inputs(self, batch: ClassificationBatch, state: State) -> tuple[LayerOutput, Tensor]:
        return self._hidden(batch.tokens, self._data_positions(batch), no_watch), batch.labels

    def _hidden(self, tokens: Tensor, positions: TokenPositions, watch: WatchFn) -> LayerOutput:
        hidden = self._encode(tokens, positions, watch)
        return LayerOutput(self.pool(hidden.y, positions), None, hidden.loss)
