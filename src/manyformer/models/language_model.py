"""A decoder-only language model: embed, one layer, head."""

from typing import NamedTuple, final

import torch
from jaxtyping import Int
from torch import Tensor

from manyformer.batches import Batch, CausalLMBatch
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
from manyformer.models.model import BatchLoss, BatchScore, Model, ModelOutput, longest_in
from manyformer.models.output_head import OutputHead
from manyformer.models.token_positions import StreamTail, empty_tail, positions_of
from manyformer.training_hooks import uses_neighbours


class ModelState(NamedTuple):
    """What a model remembers between calls: its layers' state and where each row stands."""

    body: State
    tail: StreamTail


@final
class LanguageModel(Model):
    """Predicts each next token: `logits[:, i]` is about token i + 1.

    `segments` numbers the documents of packed rows, -1 is padding, None is one document a row. With a state from
    `init_state` or from an earlier call it goes on from there; `capacity` reserves room and is for `torch.no_grad()`.
    `neighbours` are tokens that were looked up for each token, 0 for none, where something in `body` is
    `UsesNeighbours`. `auxiliary` adds losses from between the layers of `body`, which then must show them."""

    def __init__(
        self, embed: TokenEmbedding, body: Layer, head: OutputHead, *, auxiliary: AuxiliaryLoss | None = None
    ) -> None:
        super().__init__()
        if auxiliary is not None and not isinstance(body, LayeredStack):
            raise ValueError(f"auxiliary losses need the layers of a Chain, and a {type(body).__name__} shows none")
        self.embed, self.body, self.head, self.auxiliary = embed, body, head, auxiliary
        self.max_length, self.vocab = longest_in(embed, body), head.classes

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

    def loss(self, batch: Batch, *, smoothing: float = 0.0, state: ModelState | None = None) -> BatchLoss:
        """The training loss; with a state, of rows that go on from it."""
        assert isinstance(batch, CausalLMBatch)
        if self.auxiliary is not None:
            if state is not None:
                raise ValueError("losses between layers are for training without a state")
            return self._deep_loss(batch, self.auxiliary, smoothing)
        hidden, state, extra = self.hidden(batch.tokens, batch.segments, state, neighbours=batch.neighbours)
        return self.head.loss(hidden, batch.targets, smoothing=smoothing)._replace(extra=extra, state=state)

    def score(self, batch: Batch, *, state: ModelState | None = None) -> BatchScore:
        """The plain negative log-likelihood and accuracy; with a state, of rows that go on from it."""
        assert isinstance(batch, CausalLMBatch)
        hidden, state, _ = self.hidden(batch.tokens, batch.segments, state, neighbours=batch.neighbours)
        return self.head.score(hidden, batch.targets)._replace(state=state)

    def _deep_loss(self, batch: CausalLMBatch, auxiliary: AuxiliaryLoss, smoothing: float) -> BatchLoss:
        assert isinstance(self.body, LayeredStack)
        self.check_length(batch.tokens.shape[1])
        place, _ = positions_of(batch.tokens, batch.segments, None)
        x = self.embed(batch.tokens, place)
        return deep_loss(auxiliary, self.body, x, Context(place), self.head, batch.targets, smoothing=smoothing)

    def hidden(
        self,
        tokens: Int[Tensor, "b l"],
        segments: Int[Tensor, "b l"] | None = None,
        state: ModelState | None = None,
        *,
        neighbours: Int[Tensor, "b l k"] | None = None,
        watch: WatchFn = no_watch,
    ) -> LayerOutput:
        """What the head is given, as `forward` goes on from it."""
        place, tail = positions_of(tokens, segments, None if state is None else state.tail)
        self.check_length(tokens.shape[1])
        ctx = Context(place, None if neighbours is None else self._recalled(neighbours), watch)
        y, body, loss = self.body(self.embed(tokens, place), ctx, state and state.body)
        return LayerOutput(y, None if tail is None else ModelState(body, tail), loss)

    def _recalled(self, neighbours: Int[Tensor, "b l k"]) -> MemorySequence:
        """The embeddings of what was looked up for each token; token 0, which is none, is padding."""
        if not uses_neighbours(self.body):
            raise ValueError("nothing in this model takes what was looked up (neighbours); the recipe spalm does")
        every = neighbours.flatten(1)
        pos = torch.zeros_like(every)
        return MemorySequence(self.embed.token(every), TokenPositions(pos, torch.where(every == 0, PADDING_SEGMENT, 0)))
