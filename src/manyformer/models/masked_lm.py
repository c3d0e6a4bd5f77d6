"""An encoder that fills in masked tokens."""

from typing import final

from jaxtyping import Int
from torch import Tensor

from manyformer.batches import IGNORE, Batch, MaskedBatch
from manyformer.core import Layer, Place, Watch, ignore
from manyformer.mixers.summaries import EachPart, Summarised
from manyformer.models.base import Loss, ModelOut, Score
from manyformer.models.contrast import Contrast
from manyformer.models.embedding import Embedding
from manyformer.models.encoder import Encoder
from manyformer.models.head import Head


@final
class MaskedLM(Encoder):
    """Predicts the tokens behind masks (Devlin et al. 2019, section 3.1): `logits[:, i]` is about token i itself.

    `roles` are 1 for tokens that see all and are seen by all, `parts` number the sentences of a document from 0, for
    models that ask; others raise ValueError. `contrast` is another objective of training, for bodies with summaries.
    """

    def __init__(self, embed: Embedding, body: Layer, head: Head, *, contrast: Contrast | None = None) -> None:
        super().__init__(embed, body, head)
        if contrast is not None and not (isinstance(body, Summarised) and isinstance(body.kinds, EachPart)):
            raise ValueError(f"parts are told apart by their summaries, and a {type(body).__name__} has none of parts")
        self.contrast = contrast

    def forward(
        self,
        tokens: Int[Tensor, "b l"],
        segments: Int[Tensor, "b l"] | None = None,
        roles: Int[Tensor, "b l"] | None = None,
        parts: Int[Tensor, "b l"] | None = None,
        *,
        watch: Watch = ignore,
    ) -> ModelOut:
        hidden = self._hidden(tokens, self._place(tokens, segments, roles=roles, parts=parts), watch)
        return ModelOut(self.head(hidden.y), None, hidden.loss)

    def loss(self, batch: Batch, *, smoothing: float = 0.0) -> Loss:
        assert isinstance(batch, MaskedBatch)
        place = self._where(batch)
        apart: Tensor | float = 0.0
        if self.contrast is None:
            hidden = self._hidden(batch.tokens, place, ignore)
        else:
            assert isinstance(self.body, Summarised)
            hidden, apart = self.contrast(self.embed, self.body, batch, place)
            # while training, one pass serves both: more is hidden than the batch says
            hidden = hidden if self.training else self._hidden(batch.tokens, place, ignore)
        wanted = batch.targets != IGNORE
        found = self.head.loss(hidden.y[wanted], batch.targets[wanted], smoothing=smoothing)
        return found._replace(extra=hidden.loss + apart)

    def score(self, batch: Batch) -> Score:
        assert isinstance(batch, MaskedBatch)
        hidden, targets = self._wanted(batch.tokens, batch.targets, self._where(batch))
        return self.head.score(hidden.y, targets)

    def _where(self, batch: MaskedBatch) -> Place:
        return self._place(batch.tokens, batch.segments, roles=batch.roles, parts=batch.parts)
