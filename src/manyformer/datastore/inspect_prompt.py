"""What was retrieved, for a person: the nearest contexts of a prompt, and what followed them."""

from typing import NamedTuple

import torch

from manyformer.data import Tokenizer
from manyformer.datastore.datastore import Datastore
from manyformer.datastore.exact_search import Neighbours
from manyformer.datastore.knn_head import KNNHead, neighbour_distribution, neighbour_weights
from manyformer.errors import UserError
from manyformer.models import LanguageModel

BEFORE, AFTER = 12, 4
"""Tokens of a neighbour that are shown on either side of the one that followed it."""


class NeighbourView(NamedTuple):
    """A context of the datastore: its end, the token that followed it and what came then; its distance and share."""

    entry: int
    context: str
    token: str
    continuation: str
    distance: float
    share: float


class TokenGuess(NamedTuple):
    """A next token by its probability: for the model, for the neighbours, and for both."""

    token: str
    model: float
    neighbours: float
    both: float


class PromptNeighbours(NamedTuple):
    """What a prompt found: the likeliest next tokens and the nearest neighbours."""

    prompt: str
    guesses: tuple[TokenGuess, ...]
    neighbours: tuple[NeighbourView, ...]


def inspect_prompt(model: LanguageModel, prompt: str, *, shown: int = 10, guesses: int = 5) -> PromptNeighbours:
    """What `model`, made by `knn_lm`, finds after `prompt`. Raises UserError for any other model."""
    head, words = model.head, model.tokenizer
    if not isinstance(head, KNNHead):
        raise UserError("this model looks into no datastore: make one of it with knn_lm(model, store)")
    if not isinstance(words, Tokenizer):
        raise UserError("the model was saved without a tokenizer, so it cannot read a prompt")
    tokens = [words.bos, *words.encode(prompt)]
    with torch.inference_mode():
        x = model.hidden(torch.tensor([tokens], device=model.device)).y[:, -1]
        found = head.store.search(head.key(x), min(len(head.store), max(shown, head.mix.neighbours)))
        # those beyond the neighbours that count have no share
        near = Neighbours(*(part[:, : head.mix.neighbours] for part in found))
        each = torch.zeros_like(found.distances)
        each[:, : near.distances.shape[1]] = neighbour_weights(near.distances, head.mix.temperature)
        own = head.head(x[:, : head.stream]).float().softmax(-1)[0]
        theirs = neighbour_distribution(near, head.store.following(near.entries), head.classes, head.mix.temperature)[
            0
        ].float()
        both = torch.lerp(own, theirs, head.mix.weight)
    best = both.topk(min(guesses, head.classes)).indices.tolist()
    rows = zip(*(part[0, :shown].tolist() for part in (found.entries, found.distances, each)))
    return PromptNeighbours(
        prompt,
        tuple(TokenGuess(words.token(t), float(own[t]), float(theirs[t]), float(both[t])) for t in best),
        tuple(_neighbour(head.store, words, *row) for row in rows if row[0] >= 0),
    )


def _neighbour(store: Datastore, words: Tokenizer, entry: int, distance: float, share: float) -> NeighbourView:
    before, token, after = store.context(entry, BEFORE, AFTER)
    return NeighbourView(entry, words.decode(before), words.token(token), words.decode(after), distance, share)
