"""A masked language model: an encoder that predicts masked tokens."""

from typing import final

from jaxtyping import Int
from torch import Tensor

from manyformer.batches import IGNORE_INDEX, MaskedLMBatch
from manyformer.core import Layer, State, TokenPositions, WatchFn, no_watch
from manyformer.mixers.global_summaries import PartSummaries, SummaryPrefixedLayer
from manyformer.models.contrastive_loss import PartContrastiveLoss
from manyformer.models.embedding import TokenEmbedding
from manyformer.models.encoder_model import EncoderModel
from manyformer.models.head import ClassHead
from manyformer.models.model import BatchLoss, BatchScore, ModelOutput


@final
class MaskedLM(EncoderModel[MaskedLMBatch]):
    """Predicts masked tokens (Devlin et al. 2019, section 3.1): `logits[:, i]` are the logits of token i itself.

    `roles` are 1 for global tokens, and `parts` number the parts (such as sentences) of a document from 0; both raise
    ValueError for models that do not use them. `contrast` is an additional training loss, for bodies with summaries.
    """

    def __init__(
        self, embed: TokenEmbedding, body: Layer, head: ClassHead, *, contrast: PartContrastiveLoss | None = None
    ) -> None:
        super().__init__(embed, body, head)
        if contrast is not None and not (
            isinstance(body, SummaryPrefixedLayer) and isinstance(body.summary_tokens, PartSummaries)
        ):
            raise ValueError(f"the contrastive loss needs summaries of parts, and a {type(body).__name__} has none")
        self.contrast = contrast

    def forward(
        self,
        tokens: Int[Tensor, "b l"],
        segments: Int[Tensor, "b l"] | None = None,
        roles: Int[Tensor, "b l"] | None = None,
        parts: Int[Tensor, "b l"] | None = None,
        *,
        watch: WatchFn = no_watch,
    ) -> ModelOutput:
        hidden = self._encode(tokens, self._token_positions(tokens, segments, roles=roles, parts=parts), watch)
        return ModelOutput(self.head(hidden.y), None, hidden.loss)

    def loss(self, batch: MaskedLMBatch, *, label_smoothing: float = 0.0, state: State = None) -> BatchLoss:
        positions = self._batch_positions(batch)
        contrastive_loss: Tensor | float = 0.0
        if self.contrast is None:
            hidden = self._encode(batch.tokens, positions, no_watch)
        else:
            assert isinstance(self.body, SummaryPrefixedLayer)
            hidden, contrastive_loss = self.contrast(self.embed, self.body, batch, positions)
            # in training both losses share one pass, in which the contrastive loss masks additional tokens
            hidden = hidden if self.training else self._encode(batch.tokens, positions, no_watch)
        scored = batch.targets != IGNORE_INDEX
        loss = self.head.loss(hidden.y[scored], batch.targets[scored], label_smoothing=label_smoothing)
        return loss._replace(extra=hidden.loss + contrastive_loss)

    def score(self, batch: MaskedLMBatch, *, state: State = None) -> BatchScore:
        hidden, targets = self._encode_targets(batch.tokens, batch.targets, self._batch_positions(batch))
        return self.head.score(hidden.y, targets)

    def _batch_positions(self, batch: MaskedLMBatch) -> TokenPositions:
        return self._token_positions(batch.tokens, batch.segments, roles=batch.roles, parts=batch.parts)
