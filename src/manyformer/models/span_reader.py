"""An encoder that marks the first and the last token of an answer in a text."""

from typing import final

import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from manyformer.batches import IGNORE_INDEX, AnswerSpanBatch
from manyformer.core import PADDING_SEGMENT, State, no_watch
from manyformer.errors import UserError
from manyformer.models.encoder_model import TextEncoderModel
from manyformer.models.head import BatchLoss, BatchScore, count_targets
from manyformer.models.model import ModelOutput, apply_head


@final
class SpanReader(TextEncoderModel[AnswerSpanBatch]):
    """Scores every token as the first and as the last one of an answer (Devlin et al. 2019, section 4.2).

    Logits are (b, l, 2). Both softmaxes are over the tokens of a row, so that the losses of a row are two. A question
    without an answer has the first token of the row as its span (section 4.3). `roles` are 1 for global tokens, such as
    those of the question, `parts` number the sentences; both raise ValueError for models that do not use them."""

    def row_logits(self, batch: AnswerSpanBatch) -> ModelOutput:
        """The logits (b, 2, l) of a batch, minus infinity at padding, in float32."""
        hidden = self._encode(batch.tokens, self._data_positions(batch), no_watch)
        logits = apply_head(self.head, hidden.y).float().mT
        if batch.segments is not None:
            logits = logits.masked_fill((batch.segments == PADDING_SEGMENT)[:, None], -float("inf"))
        return ModelOutput(logits, None, hidden.loss)

    def loss(self, batch: AnswerSpanBatch, *, label_smoothing: float = 0.0, state: State = None) -> BatchLoss:
        """The sum of the losses of both ends. Raises UserError for label smoothing, which would reach padding."""
        if label_smoothing:
            raise UserError(
                "loss.label_smoothing spreads over labels, and the ends of an answer are tokens; leave it 0"
            )
        logits, _, extra = self.row_logits(batch)
        return BatchLoss(_row_loss(logits, batch.targets), count_targets(batch.targets), extra)

    def score(self, batch: AnswerSpanBatch, *, state: State = None) -> BatchScore:
        logits = self.row_logits(batch).logits
        correct = (logits.argmax(-1) == batch.targets).sum()
        return BatchScore(_row_loss(logits, batch.targets).cpu().double(), count_targets(batch.targets), correct)


def _row_loss(logits: Float[Tensor, "b 2 l"], targets: Int[Tensor, "b 2"]) -> Float[Tensor, ""]:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
