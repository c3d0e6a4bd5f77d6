"""An encoder that fills in masked tokens."""

from typing import final

from jaxtyping import Int
from torch import Tensor

from manyformer.batches import Batch, MaskedBatch
from manyformer.core import Out, Watch, ignore
from manyformer.models.base import Loss, ModelOut, Score
from manyformer.models.encoder import Encoder


@final
class MaskedLM(Encoder):
    """Predicts the tokens behind masks (Devlin et al. 2019, section 3.1): `logits[:, i]` is about token i itself."""

    def forward(
        self, tokens: Int[Tensor, "b l"], segments: Int[Tensor, "b l"] | None = None, *, watch: Watch = ignore
    ) -> ModelOut:
        hidden = self._hidden(tokens, self._place(tokens, segments), watch)
        return ModelOut(self.head(hidden.y), None, hidden.loss)

    def loss(self, batch: Batch, *, smoothing: float = 0.0) -> Loss:
        hidden, targets = self._chosen(batch)
        return self.head.loss(hidden.y, targets, smoothing=smoothing)._replace(extra=hidden.loss)

    def score(self, batch: Batch) -> Score:
        hidden, targets = self._chosen(batch)
        return self.head.score(hidden.y, targets)

    def _chosen(self, batch: Batch) -> tuple[Out, Tensor]:
        assert isinstance(batch, MaskedBatch)
        return self._wanted(batch.tokens, batch.targets, self._place(batch.tokens, batch.segments))
