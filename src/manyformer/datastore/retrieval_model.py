"""Decoding with a retrieval-augmented model: a trained retriever searches the neighbours of each token."""

from typing import Any, NamedTuple, final

import torch
from jaxtyping import Int
from torch import Tensor, nn

from manyformer.core import State
from manyformer.datastore.datastore import Datastore
from manyformer.datastore.knn_head import check_fits
from manyformer.errors import UserError
from manyformer.models import Model, ModelOutput
from manyformer.models.generative_model import as_language_model
from manyformer.training_hooks import uses_neighbours


class RetrievalState(NamedTuple):
    """The states of the retriever and of the model."""

    retriever: State
    model: State


@final
class RetrievalAugmentedModel(nn.Module):
    """`model` with the tokens that followed the `k` nearest contexts of a datastore, searched with keys of `retriever`.

    A language model for `generate` and, in an adapter, for `check`: it has a state and fulfills the contracts of its
    recipe. Raises UserError for a model that does not use neighbours, or for another retriever's datastore.
    """

    def __init__(self, model: Model, retriever: Model, store: Datastore, *, k: int = 4) -> None:
        super().__init__()
        if not uses_neighbours(model):
            raise UserError("this model does not use retrieved tokens (neighbours); the recipe spalm does")
        reader = check_fits(retriever, store).reader
        if model.vocab != reader.vocab:
            raise UserError(
                f"the retriever has a vocabulary of {reader.vocab} tokens and the model one of {model.vocab}: they "
                "must be equal"
            )
        self.model, self.retriever = as_language_model(model, "use retrieved tokens"), reader
        self.store, self.k, self.vocab, self.tokenizer = store, k, model.vocab, model.tokenizer
        max_lengths = [length for length in (model.max_length, retriever.max_length) if length is not None]
        self.max_length = min(max_lengths, default=None)
        self.eval()

    def init_state(self, batch: int, *, capacity: int | None = None) -> RetrievalState:
        """The state before any token."""
        return RetrievalState(
            self.retriever.init_state(batch, capacity=capacity), self.model.init_state(batch, capacity=capacity)
        )

    def forward(
        self,
        tokens: Int[Tensor, "b l"],
        segments: Int[Tensor, "b l"] | None = None,
        state: RetrievalState | None = None,
    ) -> ModelOutput:
        states: Any = (None, None) if state is None else state
        with torch.no_grad():
            retrieved = self.retriever.hidden(tokens, segments, states[0])
            keys = retrieved.y[..., -self.store.facts.width :]
            entries = self.store.search(keys.flatten(0, 1), self.k).entries
        neighbours = self.store.next_tokens(entries).view(*tokens.shape, self.k)
        logits, model_state, loss = self.model(tokens, segments, states[1], neighbours=neighbours)
        return ModelOutput(logits, None if state is None else RetrievalState(retrieved.state, model_state), loss)
