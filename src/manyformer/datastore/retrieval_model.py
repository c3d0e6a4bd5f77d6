"""Writing with a model that looks things up: another model, trained before, finds the neighbours as it goes."""

from typing import Any, NamedTuple, final

import torch
from jaxtyping import Int
from torch import Tensor, nn

from manyformer.core import State
from manyformer.datastore.context_keys import keyed
from manyformer.datastore.datastore import Datastore
from manyformer.datastore.knn_head import check_fits
from manyformer.errors import UserError
from manyformer.models import LanguageModel, Model, ModelOutput
from manyformer.training_hooks import uses_neighbours


class RetrievalState(NamedTuple):
    """What the two models remember."""

    retriever: State
    model: State


@final
class RetrievalAugmentedModel(nn.Module):
    """`model` given what followed the `k` contexts of a datastore that are nearest for `retriever`.

    A language model for `generate` and, in an adapter, for `check`: it starts, goes on from a state and keeps its
    promises. Raises UserError for a model that takes nothing that was looked up, or for another retriever's datastore.
    """

    def __init__(self, model: Model, retriever: Model, store: Datastore, *, k: int = 4) -> None:
        super().__init__()
        if not isinstance(model, LanguageModel) or not uses_neighbours(model):
            raise UserError("nothing in this model takes what was looked up; the recipe spalm does")
        check_fits(retriever, store)
        assert isinstance(retriever, LanguageModel)
        if model.vocab != retriever.vocab:
            raise UserError(
                f"the retriever knows {retriever.vocab} tokens and the model {model.vocab}: both need the same"
            )
        body = keyed(retriever, store.facts.keys).body
        self.model, self.reader = model, LanguageModel(retriever.embed, body, retriever.head)
        self.store, self.k, self.vocab, self.tokenizer = store, k, model.vocab, model.tokenizer
        limits = [one for one in (model.max_length, retriever.max_length) if one is not None]
        self.max_length = min(limits, default=None)
        self.eval()

    def init_state(self, batch: int, *, capacity: int | None = None) -> RetrievalState:
        """The state before any token."""
        return RetrievalState(
            self.reader.init_state(batch, capacity=capacity), self.model.init_state(batch, capacity=capacity)
        )

    def forward(
        self,
        tokens: Int[Tensor, "b l"],
        segments: Int[Tensor, "b l"] | None = None,
        state: RetrievalState | None = None,
    ) -> ModelOutput:
        before: Any = (None, None) if state is None else state
        with torch.no_grad():
            read = self.reader.hidden(tokens, segments, before[0])
            keys = read.y[..., -self.store.facts.width :]
            found = self.store.search(keys.flatten(0, 1), self.k).entries
        neighbours = self.store.following(found).view(*tokens.shape, self.k)
        logits, after, loss = self.model(tokens, segments, before[1], neighbours=neighbours)
        return ModelOutput(logits, None if state is None else RetrievalState(read.state, after), loss)
