"""An encoder that fills in masked tokens."""

from typing import final

from jaxtyping import Int
from torch import Tensor

from manyformer.batches import IGNORE, Batch, MaskedBatch
from manyformer.core import Context, Layer, Out, Watch, ignore
from manyformer.models.base import Loss, Model, ModelOut, Score
from manyformer.models.embedding import Embedding
from manyformer.models.head import Head
from manyformer.models.places import locate


@final
class MaskedLM(Model):
    """Predicts the tokens behind masks (Devlin et al. 2019, section 3.1): `logits[:, i]` is about token i itself."""

    def __init__(self, embed: Embedding, body: Layer, head: Head) -> None:
        super().__init__()
        self.embed, self.body, self.head = embed, body, head
        self.longest = embed.position.longest

    def forward(
        self, tokens: Int[Tensor, "b l"], segments: Int[Tensor, "b l"] | None = None, *, watch: Watch = ignore
    ) -> ModelOut:
        hidden = self._hidden(tokens, segments, watch)
        return ModelOut(self.head(hidden.y), None, hidden.loss)

    def loss(self, batch: Batch, *, smoothing: float = 0.0) -> Loss:
        assert isinstance(batch, MaskedBatch)
        hidden = self._hidden(batch.tokens, batch.segments, ignore)
        # only the chosen tokens, about one in seven, are worth the wide projection
        chosen = batch.targets != IGNORE
        return self.head.loss(hidden.y[chosen], batch.targets[chosen], smoothing=smoothing)._replace(extra=hidden.loss)

    def score(self, batch: Batch) -> Score:
        assert isinstance(batch, MaskedBatch)
        chosen = batch.targets != IGNORE
        hidden = self._hidden(batch.tokens, batch.segments, ignore)
        return self.head.score(hidden.y[chosen], batch.targets[chosen])

    def _hidden(self, tokens: Tensor, segments: Tensor | None, watch: Watch) -> Out:
        self.check_length(tokens.shape[1])
        place, _ = locate(tokens, segments, None)
        return self.body(self.embed(tokens, place), Context(place, watch=watch))
