"""A decoder-only language model: embedding, layer, head."""

from typing import final

import torch
from jaxtyping import Int
from torch import Tensor

from manyformer.batches import NO_NEIGHBOUR, CausalLMBatch, ignore_all
from manyformer.binding import has_hooks
from manyformer.core import (
    PADDING_SEGMENT,
    Layer,
    LayerOutput,
    MemorySequence,
    State,
    TokenPositions,
    WatchFn,
    no_watch,
)
from manyformer.models.auxiliary_losses import AuxiliaryLoss
from manyformer.models.embedding import TokenEmbedding
from manyformer.models.generative_model import DecoderInput, GenerativeModel, ModelState
from manyformer.models.model import ModelOutput, max_length_of
from manyformer.models.output_head import OutputHead
from manyformer.models.token_inputs import apply_head, check_token_range
from manyformer.training_hooks import StatefulAcrossBatches, uses_neighbours


@final
class LanguageModel(GenerativeModel[CausalLMBatch]):
    """Predicts each next token: `logits[:, i]` are the logits of token i + 1.

    `segments` numbers the documents of packed rows, -1 is padding, None means one document per row. With a state from
    `init_state` or an earlier call the rows are continued; `capacity` preallocates buffers, for use in
    `torch.no_grad()`. `neighbours` are k tokens retrieved for each token, 0 for none, for models with a
    `UsesNeighbours` module in `body`. `auxiliary` adds losses of the intermediate layers of `body`, which then must be
    a `LayeredStack`; ValueError otherwise."""

    divides_columns = True

    def __init__(
        self, embed: TokenEmbedding, body: Layer, head: OutputHead, *, auxiliary: AuxiliaryLoss | None = None
    ) -> None:
        super().__init__()
        self.embed, self.body, self.max_length = embed, body, max_length_of(embed, body)
        self.set_head(head, auxiliary)

    def forward(
        self,
        tokens: Int[Tensor, "b l"],
        segments: Int[Tensor, "b l"] | None = None,
        state: ModelState | None = None,
        *,
        neighbours: Int[Tensor, "b l k"] | None = None,
        watch: WatchFn = no_watch,
    ) -> ModelOutput:
        hidden, state, loss = self.hidden(tokens, segments, state, neighbours=neighbours, watch=watch)
        return ModelOutput(apply_head(self.head, hidden), state, loss)

    def last_logits(
        self, tokens: Int[Tensor, "b l"], segments: Int[Tensor, "b l"] | None = None, state: ModelState | None = None
    ) -> ModelOutput:
        """`forward` with the logits of the last token alone (b, 1, v): what follows a prompt needs no others."""
        if has_hooks(self):
            output: ModelOutput = self(tokens, segments, state)
            return output._replace(logits=output.logits[:, -1:])
        hidden, state, loss = self.hidden(tokens, segments, state)
        return ModelOutput(apply_head(self.head, hidden[:, -1:]), state, loss)

    @property
    def carries_state(self) -> bool:
        return any(
            module.carries_across_batches for module in self.modules() if isinstance(module, StatefulAcrossBatches)
        )

    @property
    def decoder_embed(self) -> TokenEmbedding:
        return self.embed

    @property
    def decoder_stack(self) -> Layer:
        return self.body

    def with_decoder(self, stack: Layer, head: OutputHead, auxiliary: AuxiliaryLoss | None) -> "LanguageModel":
        return type(self)(self.embed, stack, head, auxiliary=auxiliary)

    def forward_token(self, tokens: Tensor, state: State, memory: MemorySequence | None) -> tuple[Tensor, State]:
        logits, next_state, _ = self(tokens, None, state)
        return logits, next_state

    def decoder_input(self, batch: CausalLMBatch) -> DecoderInput:
        return DecoderInput(batch.tokens, batch.segments, self._embed_neighbours(batch.neighbours), batch.targets)

    def own_columns(self, batch: CausalLMBatch) -> CausalLMBatch:
        if self.column_span is None:
            return batch
        begin, end = self.column_span(batch.tokens.shape[1])
        targets = ignore_all(batch.targets)
        targets[:, begin:end] = batch.targets[:, begin:end]
        return batch._replace(targets=targets)

    def hidden(
        self,
        tokens: Int[Tensor, "b l"],
        segments: Int[Tensor, "b l"] | None = None,
        state: ModelState | None = None,
        *,
        neighbours: Int[Tensor, "b l k"] | None = None,
        watch: WatchFn = no_watch,
    ) -> LayerOutput:
        """The hidden states before the head (b, l, d), with the next state and auxiliary losses."""
        return self._run_decoder(tokens, segments, self._embed_neighbours(neighbours), state, watch)

    def _embed_neighbours(self, neighbours: Int[Tensor, "b l k"] | None) -> MemorySequence | None:
        """The embeddings of the retrieved tokens, (b, l * k, d); `NO_NEIGHBOUR` is padding."""
        if neighbours is None:
            return None
        if not uses_neighbours(self.body):
            raise ValueError("this model does not use retrieved tokens (neighbours); the recipe spalm does")
        is_missing = neighbours.flatten(1) == NO_NEIGHBOUR
        flat_ids = neighbours.flatten(1).masked_fill(is_missing, 0)
        check_token_range(flat_ids, self.embed.vocab)
        position_ids = torch.zeros_like(flat_ids)
        positions = TokenPositions(position_ids, torch.where(is_missing, PADDING_SEGMENT, 0))
        return MemorySequence(self.embed.token(flat_ids), positions)
