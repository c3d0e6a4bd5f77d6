"""An encoder that assigns a label to each word."""

from typing import final

from jaxtyping import Int
from torch import Tensor

from manyformer.batches import TaggingBatch
from manyformer.core import LayerOutput, State, WatchFn, no_watch
from manyformer.models.encoder_model import EncoderModel, select_targets
from manyformer.models.model import ModelOutput, apply_head


@final
class Tagger(EncoderModel[TaggingBatch]):
    """Labels each word at its first token (as Devlin et al. 2019, section 5.3); logits are (b, l, classes).

    `trees` holds the three numbers of each token's node in the dependency tree, for tree position encodings.
    `manyformer.structures` computes them from heads (`preorder_columns`); all tokens of a word share
    them."""

    def forward(
        self,
        tokens: Int[Tensor, "b l"],
        segments: Int[Tensor, "b l"] | None = None,
        trees: Int[Tensor, "b l 3"] | None = None,
        *,
        watch: WatchFn = no_watch,
    ) -> ModelOutput:
        hidden = self._encode(tokens, self._token_positions(tokens, segments, trees=trees), watch)
        return ModelOutput(apply_head(self.head, hidden.y), None, hidden.loss)

    def head_inputs(self, batch: TaggingBatch, state: State) -> tuple[LayerOutput, Tensor]:
        positions = self._token_positions(batch.tokens, batch.segments, trees=batch.trees, layout=batch.layout)
        return select_targets(self._encode(batch.tokens, positions, no_watch), batch.targets, batch.scored)
