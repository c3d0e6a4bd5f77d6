"""An encoder that gives every word a label."""

from typing import final

from jaxtyping import Int
from torch import Tensor

from manyformer.batches import Batch, TagBatch
from manyformer.core import Out, Watch, ignore
from manyformer.models.base import Loss, ModelOut, Score
from manyformer.models.encoder import Encoder


@final
class Tagger(Encoder):
    """One label a word, read at the word's first token (as Devlin et al. 2019, section 5.3): logits (b, l, classes).

    `trees` tell where each token hangs in its sentence's tree, for positions that ask; `manyformer.trees.walk` makes
    them from heads, and all tokens of a word have its three numbers.
    """

    def forward(
        self,
        tokens: Int[Tensor, "b l"],
        segments: Int[Tensor, "b l"] | None = None,
        trees: Int[Tensor, "b l 3"] | None = None,
        *,
        watch: Watch = ignore,
    ) -> ModelOut:
        hidden = self._hidden(tokens, self._place(tokens, segments, trees=trees), watch)
        return ModelOut(self.head(hidden.y), None, hidden.loss)

    def loss(self, batch: Batch, *, smoothing: float = 0.0) -> Loss:
        hidden, targets = self._read(batch)
        return self.head.loss(hidden.y, targets, smoothing=smoothing)._replace(extra=hidden.loss)

    def score(self, batch: Batch) -> Score:
        hidden, targets = self._read(batch)
        return self.head.score(hidden.y, targets)

    def _read(self, batch: Batch) -> tuple[Out, Tensor]:
        assert isinstance(batch, TagBatch)
        return self._wanted(batch.tokens, batch.targets, self._place(batch.tokens, batch.segments, trees=batch.trees))
