"""An encoder that gives every word a label."""

from typing import final

from jaxtyping import Int
from torch import Tensor

from manyformer.batches import Batch, TaggingBatch
from manyformer.core import LayerOutput, WatchFn, no_watch
from manyformer.models.encoder_model import EncoderModel
from manyformer.models.model import BatchLoss, BatchScore, ModelOutput


@final
class Tagger(EncoderModel):
    """One label a word, read at the word's first token (as Devlin et al. 2019, section 5.3): logits (b, l, classes).

    `trees` tell where each token hangs in its sentence's tree, for positions that ask;
    `manyformer.dependency_trees.walk` makes them from heads, and all tokens of a word have its three numbers."""

    def forward(
        self,
        tokens: Int[Tensor, "b l"],
        segments: Int[Tensor, "b l"] | None = None,
        trees: Int[Tensor, "b l 3"] | None = None,
        *,
        watch: WatchFn = no_watch,
    ) -> ModelOutput:
        hidden = self._hidden(tokens, self._place(tokens, segments, trees=trees), watch)
        return ModelOutput(self.head(hidden.y), None, hidden.loss)

    def loss(self, batch: Batch, *, smoothing: float = 0.0) -> BatchLoss:
        hidden, targets = self._read(batch)
        return self.head.loss(hidden.y, targets, smoothing=smoothing)._replace(extra=hidden.loss)

    def score(self, batch: Batch) -> BatchScore:
        hidden, targets = self._read(batch)
        return self.head.score(hidden.y, targets)

    def _read(self, batch: Batch) -> tuple[LayerOutput, Tensor]:
        assert isinstance(batch, TaggingBatch)
        return self._wanted(batch.tokens, batch.targets, self._place(batch.tokens, batch.segments, trees=batch.trees))
