"""A decoder-only language model: embed, one layer, head."""

from typing import NamedTuple, final

import torch
from jaxtyping import Int
from torch import Tensor

from manyformer.batches import Batch, TextBatch
from manyformer.core import PADDING, Context, Deep, Layer, Memory, Out, Place, State, Watch, ignore
from manyformer.hooks import recalls
from manyformer.models.auxiliary import Auxiliary, deep_loss
from manyformer.models.base import Loss, Model, ModelOut, Score, longest_in
from manyformer.models.embedding import Embedding
from manyformer.models.output import Output
from manyformer.models.places import Tail, fresh, locate


class Stream(NamedTuple):
    """What a model remembers between calls: its layers' state and where each row stands."""

    body: State
    tail: Tail


@final
class LanguageModel(Model):
    """Predicts each next token: `logits[:, i]` is about token i + 1.

    `segments` numbers the documents of packed rows, -1 is padding, None is one document a row. With a state from
    `start` or from an earlier call it goes on from there; `capacity` reserves room and is for `torch.no_grad()`.
    `neighbours` are tokens that were looked up for each token, 0 for none, where something in `body` is `Recalling`.
    `auxiliary` adds losses from between the layers of `body`, which then must show them.
    """

    def __init__(self, embed: Embedding, body: Layer, head: Output, *, auxiliary: Auxiliary | None = None) -> None:
        super().__init__()
        if auxiliary is not None and not isinstance(body, Deep):
            raise ValueError(f"auxiliary losses need the layers of a Chain, and a {type(body).__name__} shows none")
        self.embed, self.body, self.head, self.auxiliary = embed, body, head, auxiliary
        self.longest, self.vocab = longest_in(embed, body), head.classes

    def forward(
        self,
        tokens: Int[Tensor, "b l"],
        segments: Int[Tensor, "b l"] | None = None,
        state: Stream | None = None,
        *,
        neighbours: Int[Tensor, "b l k"] | None = None,
        watch: Watch = ignore,
    ) -> ModelOut:
        hidden, state, loss = self.hidden(tokens, segments, state, neighbours=neighbours, watch=watch)
        return ModelOut(self.head(hidden), state, loss)

    def start(self, batch: int, *, capacity: int | None = None) -> Stream:
        """The state before any token."""
        body = self.body.start(batch, capacity=capacity, device=self.device, dtype=self.state_dtype)
        return Stream(body, fresh(batch, self.device))

    def loss(self, batch: Batch, *, smoothing: float = 0.0, state: Stream | None = None) -> Loss:
        """The training loss; with a state, of rows that go on from it."""
        assert isinstance(batch, TextBatch)
        if self.auxiliary is not None:
            if state is not None:
                raise ValueError("losses between layers are for training without a state")
            return self._deep_loss(batch, self.auxiliary, smoothing)
        hidden, state, extra = self.hidden(batch.tokens, batch.segments, state, neighbours=batch.neighbours)
        return self.head.loss(hidden, batch.targets, smoothing=smoothing)._replace(extra=extra, state=state)

    def score(self, batch: Batch, *, state: Stream | None = None) -> Score:
        """The plain negative log-likelihood and accuracy; with a state, of rows that go on from it."""
        assert isinstance(batch, TextBatch)
        hidden, state, _ = self.hidden(batch.tokens, batch.segments, state, neighbours=batch.neighbours)
        return self.head.score(hidden, batch.targets)._replace(state=state)

    def _deep_loss(self, batch: TextBatch, auxiliary: Auxiliary, smoothing: float) -> Loss:
        assert isinstance(self.body, Deep)
        self.check_length(batch.tokens.shape[1])
        place, _ = locate(batch.tokens, batch.segments, None)
        x = self.embed(batch.tokens, place)
        return deep_loss(auxiliary, self.body, x, Context(place), self.head, batch.targets, smoothing=smoothing)

    def hidden(
        self,
        tokens: Int[Tensor, "b l"],
        segments: Int[Tensor, "b l"] | None = None,
        state: Stream | None = None,
        *,
        neighbours: Int[Tensor, "b l k"] | None = None,
        watch: Watch = ignore,
    ) -> Out:
        """What the head is given, as `forward` goes on from it."""
        place, tail = locate(tokens, segments, None if state is None else state.tail)
        self.check_length(tokens.shape[1])
        ctx = Context(place, None if neighbours is None else self._recalled(neighbours), watch)
        y, body, loss = self.body(self.embed(tokens, place), ctx, state and state.body)
        return Out(y, None if tail is None else Stream(body, tail), loss)

    def _recalled(self, neighbours: Int[Tensor, "b l k"]) -> Memory:
        """The embeddings of what was looked up for each token; token 0, which is none, is padding."""
        if not recalls(self.body):
            raise ValueError("nothing in this model takes what was looked up (neighbours); the recipe spalm does")
        every = neighbours.flatten(1)
        pos = torch.zeros_like(every)
        return Memory(self.embed.token(every), Place(pos, torch.where(every == 0, PADDING, 0)))
