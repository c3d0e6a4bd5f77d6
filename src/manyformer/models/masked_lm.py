"""An encoder that fills in masked tokens."""

from typing import final

from jaxtyping import Int
from torch import Tensor

from manyformer.batches import IGNORE_INDEX, Batch, MaskedLMBatch
from manyformer.core import Layer, TokenPositions, WatchFn, no_watch
from manyformer.mixers.global_summaries import PartSummaries, SummaryPrefixedLayer
from manyformer.models.contrastive_loss import PartContrastiveLoss
from manyformer.models.embedding import TokenEmbedding
from manyformer.models.encoder_model import EncoderModel
from manyformer.models.head import ClassHead
from manyformer.models.model import BatchLoss, BatchScore, ModelOutput


@final
class MaskedLM(EncoderModel):
    """Predicts the tokens behind masks (Devlin et al. 2019, section 3.1): `logits[:, i]` is about token i itself.

    `roles` are 1 for tokens that see all and are seen by all, `parts` number the sentences of a document from 0, for
    models that ask; others raise ValueError. `contrast` is another objective of training, for bodies with summaries.
    """

    def __init__(
        self, embed: TokenEmbedding, body: Layer, head: ClassHead, *, contrast: PartContrastiveLoss | None = None
    ) -> None:
        super().__init__(embed, body, head)
        if contrast is not None and not (
            isinstance(body, SummaryPrefixedLayer) and isinstance(body.kinds, PartSummaries)
        ):
            raise ValueError(f"parts are told apart by their summaries, and a {type(body).__name__} has none of parts")
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
        hidden = self._hidden(tokens, self._place(tokens, segments, roles=roles, parts=parts), watch)
        return ModelOutput(self.head(hidden.y), None, hidden.loss)

    def loss(self, batch: Batch, *, smoothing: float = 0.0) -> BatchLoss:
        assert isinstance(batch, MaskedLMBatch)
        place = self._where(batch)
        apart: Tensor | float = 0.0
        if self.contrast is None:
            hidden = self._hidden(batch.tokens, place, no_watch)
        else:
            assert isinstance(self.body, SummaryPrefixedLayer)
            hidden, apart = self.contrast(self.embed, self.body, batch, place)
            # while training, one pass serves both: more is hidden than the batch says
            hidden = hidden if self.training else self._hidden(batch.tokens, place, no_watch)
        wanted = batch.targets != IGNORE_INDEX
        found = self.head.loss(hidden.y[wanted], batch.targets[wanted], smoothing=smoothing)
        return found._replace(extra=hidden.loss + apart)

    def score(self, batch: Batch) -> BatchScore:
        assert isinstance(batch, MaskedLMBatch)
        hidden, targets = self._wanted(batch.tokens, batch.targets, self._where(batch))
        return self.head.score(hidden.y, targets)

    def _where(self, batch: MaskedLMBatch) -> TokenPositions:
        return self._place(batch.tokens, batch.segments, roles=batch.roles, parts=batch.parts)
