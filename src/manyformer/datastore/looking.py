"""Writing with a model that looks things up: another model, trained before, finds the neighbours as it goes."""

from typing import Any, NamedTuple, final

import torch
from jaxtyping import Int
from torch import Tensor, nn

from manyformer.core import State
from manyformer.datastore.keys import keyed
from manyformer.datastore.mixture import check_fits
from manyformer.datastore.store import Datastore
from manyformer.errors import UserError
from manyformer.hooks import recalls
from manyformer.models import LanguageModel, Model, ModelOut


class Both(NamedTuple):
    """What the two models remember."""

    retriever: State
    model: State


@final
class Looking(nn.Module):
    """`model` given what followed the `k` contexts of a datastore that are nearest for `retriever`.

    A language model for `generate` and, in an adapter, for `check`: it starts, goes on from a state and keeps its
    promises. Raises UserError for a model that takes nothing that was looked up, or for another retriever's datastore.
    """

    def __init__(self, model: Model, retriever: Model, store: Datastore, *, k: int = 4) -> None:
        super().__init__()
        if not isinstance(model, LanguageModel) or not recalls(model):
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
        limits = [one for one in (model.longest, retriever.longest) if one is not None]
        self.longest = min(limits, default=None)
        self.eval()

    def start(self, batch: int, *, capacity: int | None = None) -> Both:
        """The state before any token."""
        return Both(self.reader.start(batch, capacity=capacity), self.model.start(batch, capacity=capacity))

    def forward(
        self, tokens: Int[Tensor, "b l"], segments: Int[Tensor, "b l"] | None = None, state: Both | None = None
    ) -> ModelOut:
        before: Any = (None, None) if state is None else state
        with torch.no_grad():
            read = self.reader.hidden(tokens, segments, before[0])
            keys = read.y[..., -self.store.facts.width :]
            found = self.store.search(keys.flatten(0, 1), self.k).entries
        neighbours = self.store.following(found).view(*tokens.shape, self.k)
        logits, after, loss = self.model(tokens, segments, before[1], neighbours=neighbours)
        return ModelOut(logits, None if state is None else Both(read.state, after), loss)
