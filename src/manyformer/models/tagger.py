"""An encoder that assigns a label to each word."""

from typing import final

from jaxtyping import Int
from torch import Tensor

from manyformer.batches import TaggingBatch
from manyformer.core import LayerOutput, State, WatchFn, no_watch
from manyformer.models.encoder_model import EncoderModel
from manyformer.models.model import BatchLoss, BatchScore, ModelOutput


@final
class Tagger(EncoderModel[TaggingBatch]):
    """Labels each word at its first token (as Devlin et al. 2019, section 5.3); logits are (b, l, classes).

    `trees` holds the three numbers of each token's node in the dependency tree, for tree position encodings;
    `manyformer.dependency_trees.preorder_columns` computes them from heads, and all tokens of a word share them."""

    def forward(
        self,
        tokens: Int[Tensor, "b l"],
        segments: Int[Tensor, "b l"] | None = None,
        trees: Int[Tensor, "b l 3"] | None = None,
        *,
        watch: WatchFn = no_watch,
    ) -> ModelOutput:
        hidden = self._encode(tokens, self._token_positions(tokens, segments, trees=trees), watch)
        return ModelOutput(self.head(hidden.y), None, hidden.loss)

    def loss(self, batch: TaggingBatch, *, label_smoothing: float = 0.0, state: State = None) -> BatchLoss:
        hidden, targets = self._encode_batch(batch)
        return self.head.loss(hidden.y, targets, label_smoothing=label_smoothing)._replace(extra=hidden.loss)

    def score(self, batch: TaggingBatch, *, state: State = None) -> BatchScore:
        hidden, targets = self._encode_batch(batch)
        return self.head.score(hidden.y, targets)

    def _encode_batch(self, batch: TaggingBatch) -> tuple[LayerOutput, Tensor]:
        return self._encode_targets(
            batch.tokens, batch.targets, self._token_positions(batch.tokens, batch.segments, trees=batch.trees)
        )
