"""A decoder-only language model: embedding, layer, head."""

from typing import NamedTuple, final

import torch
from jaxtyping import Int
from torch import Tensor

from manyformer.batches import CausalLMBatch
from manyformer.binding import has_hooks
from manyformer.core import (
    PADDING_SEGMENT,
    Context,
    Layer,
    LayeredStack,
    LayerOutput,
    MemorySequence,
    State,
    TokenPositions,
    WatchFn,
    no_watch,
)
from manyformer.models.auxiliary_losses import AuxiliaryLoss, deep_loss
from manyformer.models.embedding import TokenEmbedding
from manyformer.models.generative_model import GenerativeModel
from manyformer.models.model import BatchLoss, BatchScore, ModelOutput, max_length_of
from manyformer.models.next_token_step import NextTokenFn, next_token_step
from manyformer.models.output_head import OutputHead
from manyformer.models.token_positions import StreamTail, empty_tail, positions_of
from manyformer.training_hooks import StatefulAcrossBatches, uses_neighbours


class ModelState(NamedTuple):
    """The state of a model between calls: that of its layers and the last position of each row."""

    body: State
    tail: StreamTail


@final
class LanguageModel(GenerativeModel[CausalLMBatch]):
    """Predicts each next token: `logits[:, i]` are the logits of token i + 1.

    `segments` numbers the documents of packed rows, -1 is padding, None means one document per row. With a state from
    `init_state` or an earlier call the rows are continued; `capacity` preallocates buffers, for use in
    `torch.no_grad()`. `neighbours` are k tokens retrieved for each token, 0 for none, for models with a
    `UsesNeighbours` module in `body`. `auxiliary` adds losses of the intermediate layers of `body`, which then must be
    a `LayeredStack`; ValueError otherwise."""

    def __init__(
        self, embed: TokenEmbedding, body: Layer, head: OutputHead, *, auxiliary: AuxiliaryLoss | None = None
    ) -> None:
        super().__init__()
        if auxiliary is not None and not isinstance(body, LayeredStack):
            raise ValueError(f"auxiliary losses need the layers of a Chain, and a {type(body).__name__} has none")
        self.embed, self.body, self.head, self.auxiliary = embed, body, head, auxiliary
        self.max_length, self.vocab = max_length_of(embed, body), head.classes

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
        return ModelOutput(self.head(hidden), state, loss)

    def init_state(self, batch: int, *, capacity: int | None = None) -> ModelState:
        """The state before any token."""
        body = self.body.init_state(batch, capacity=capacity, device=self.device, dtype=self.state_dtype)
        return ModelState(body, empty_tail(batch, self.device))

    @property
    def carries_state(self) -> bool:
        return any(isinstance(module, StatefulAcrossBatches) for module in self.modules())

    @property
    def decoder_stack(self) -> Layer:
        return self.body

    @property
    def decoder_width(self) -> int:
        return self.embed.token.embedding_dim

    def with_decoder(self, stack: Layer, head: OutputHead, auxiliary: AuxiliaryLoss | None) -> "LanguageModel":
        return type(self)(self.embed, stack, head, auxiliary=auxiliary)

    def next_token(self) -> NextTokenFn:
        def forward(tokens: Tensor, state: State, memory: MemorySequence | None) -> tuple[Tensor, State]:
            logits, next_state, _ = self(tokens, None, state)
            return logits, next_state

        has_step = not (self.training or has_hooks(self))
        return next_token_step(self.embed, self.body, self.head, forward) if has_step else forward

    def loss(self, batch: CausalLMBatch, *, label_smoothing: float = 0.0, state: State = None) -> BatchLoss:
        """The training loss; with a state, that of rows that continue from it."""
        if self.auxiliary is not None:
            if state is not None:
                raise ValueError("auxiliary losses of intermediate layers cannot be trained with a state")
            return self._deep_loss(batch, self.auxiliary, label_smoothing)
        hidden, state, extra = self.hidden(batch.tokens, batch.segments, state, neighbours=batch.neighbours)
        return self.head.loss(hidden, batch.targets, label_smoothing=label_smoothing)._replace(extra=extra, state=state)

    def score(self, batch: CausalLMBatch, *, state: State = None) -> BatchScore:
        """The negative log-likelihood without smoothing, and the accuracy; with a state, of rows that continue it."""
        hidden, state, _ = self.hidden(batch.tokens, batch.segments, state, neighbours=batch.neighbours)
        return self.head.score(hidden, batch.targets)._replace(state=state)

    def _deep_loss(self, batch: CausalLMBatch, auxiliary: AuxiliaryLoss, label_smoothing: float) -> BatchLoss:
        assert isinstance(self.body, LayeredStack)
        self.check_length(batch.tokens.shape[1])
        positions, _ = positions_of(batch.tokens, batch.segments, None)
        x = self.embed(batch.tokens, positions)
        return deep_loss(
            auxiliary, self.body, x, Context(positions), self.head, batch.targets, label_smoothing=label_smoothing
        )

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
        positions, tail = positions_of(tokens, segments, None if state is None else state.tail)
        self.check_length(tokens.shape[1])
        ctx = Context(positions, None if neighbours is None else self._embed_neighbours(neighbours), watch)
        y, body, loss = self.body(self.embed(tokens, positions), ctx, state and state.body)
        return LayerOutput(y, None if tail is None else ModelState(body, tail), loss)

    def _embed_neighbours(self, neighbours: Int[Tensor, "b l k"]) -> MemorySequence:
        """The embeddings of the retrieved tokens, (b, l * k, d); token 0 means none and is padding."""
        if not uses_neighbours(self.body):
            raise ValueError("this model does not use retrieved tokens (neighbours); the recipe spalm does")
        flat_ids = neighbours.flatten(1)
        position_ids = torch.zeros_like(flat_ids)
        return MemorySequence(
            self.embed.token(flat_ids), TokenPositions(position_ids, torch.where(flat_ids == 0, PADDING_SEGMENT, 0))
        )
