"""A masked language model: an encoder that predicts masked tokens."""

from typing import final

from torch import Tensor

from manyformer.batches import MaskedLMBatch
from manyformer.core import Layer, LayerOutput, State, TokenPositions, no_watch
from manyformer.mixers.global_summaries import PartSummaries
from manyformer.models.contrastive_loss import PartContrastiveLoss
from manyformer.models.embedding import TokenEmbedding
from manyformer.models.encoder_model import TextEncoderModel, select_targets
from manyformer.models.head import BatchLoss, ClassHead


@final
class MaskedLM(TextEncoderModel[MaskedLMBatch]):
    """Predicts masked tokens (Devlin et al. 2019, section 3.1): `logits[:, i]` are the logits of token i itself.

    `roles` are 1 for global tokens, and `parts` number the parts (such as sentences) of a document from 0; both raise
    ValueError for models that do not use them. `contrast` is an additional training loss, for bodies with summaries.
    """

    def __init__(
        self, embed: TokenEmbedding, body: Layer, head: ClassHead, *, contrast: PartContrastiveLoss | None = None
    ) -> None:
        super().__init__(embed, body, head)
        if contrast is not None and not isinstance(self.summary_tokens, PartSummaries):
            raise ValueError(f"the contrastive loss needs summaries of parts, and a {type(body).__name__} has none")
        self.contrast = contrast

    def head_inputs(self, batch: MaskedLMBatch, state: State) -> tuple[LayerOutput, Tensor]:
        hidden = self._encode(batch.tokens, self._batch_positions(batch), no_watch)
        return select_targets(hidden, batch.targets, batch.scored)

    def loss(self, batch: MaskedLMBatch, *, label_smoothing: float = 0.0, state: State = None) -> BatchLoss:
        if self.contrast is None:
            return super().loss(batch, label_smoothing=label_smoothing)
        assert self.summary_layer is not None
        positions = self._batch_positions(batch)
        hidden, contrastive_loss = self.contrast(self.embed, self.summary_layer, batch, positions)
        # in training both losses share one pass, in which the contrastive loss masks additional tokens
        if self.training:
            hidden = hidden
        else:
            hidden = self._encode(batch.tokens, positions, no_watch)
        scored_hidden, targets = select_targets(hidden, batch.targets, batch.scored)
        loss = self.head.loss(scored_hidden.y, targets, label_smoothing=label_smoothing)
        return BatchLoss(loss.total, loss.targets, hidden.loss + contrastive_loss)

    def _batch_positions(self, batch: MaskedLMBatch) -> TokenPositions:
        roles = batch.roles
        parts = batch.parts
        layout = batch.layout
        return self._token_positions(batch.tokens, batch.segments, roles=roles, parts=parts, layout=layout)
