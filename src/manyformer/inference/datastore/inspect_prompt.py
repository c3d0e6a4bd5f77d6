"""Inspection of retrieval: the nearest contexts of a prompt, and the tokens that followed them."""

from typing import NamedTuple

import torch

from manyformer.base.errors import UserError
from manyformer.data import Tokenizer
from manyformer.inference.datastore.datastore import Datastore
from manyformer.inference.datastore.knn_head import KNNHead, neighbour_weights
from manyformer.inference.datastore.nearest_keys import Neighbours
from manyformer.models import LanguageModel

CONTEXT_TOKENS = 12
CONTINUATION_TOKENS = 4
"""The number of tokens shown before and after the token that followed a context."""


class NeighbourView(NamedTuple):
    """A retrieved context: its end, the token that followed it and the tokens after that, its distance and weight."""

    entry: int
    context: str
    token: str
    continuation: str
    distance: float
    weight: float


class TokenGuess(NamedTuple):
    """A candidate next token with its probability by the model, by the neighbours, and by their interpolation."""

    token: str
    model: float
    neighbours: float
    combined: float


class PromptNeighbours(NamedTuple):
    """The retrieval result of a prompt: the most probable next tokens and the nearest neighbours."""

    prompt: str
    guesses: tuple[TokenGuess, ...]
    neighbours: tuple[NeighbourView, ...]


def inspect_prompt(
    model: LanguageModel, prompt: str, *, num_neighbours: int = 10, num_guesses: int = 5
) -> PromptNeighbours:
    """The retrieval result of `model`, built by `knn_lm`, for `prompt`. Raises UserError for any other model."""
    head = model.head
    tokenizer = model.tokenizer
    if not isinstance(head, KNNHead):
        raise UserError("this model does not retrieve from a datastore: use knn_lm(model, store)")
    if not isinstance(tokenizer, Tokenizer):
        raise UserError("the model was saved without a tokenizer, so it cannot read a prompt")
    tokens = [tokenizer.bos, *tokenizer.encode(prompt)]
    with torch.inference_mode():
        x = model.hidden(torch.tensor([tokens], device=model.device)).y[:, -1]
        neighbours = head.store.search(head.key(x), min(len(head.store), max(num_neighbours, head.settings.neighbours)))
        # neighbours beyond those of the settings have weight 0
        weighted = Neighbours(*(values[:, : head.settings.neighbours] for values in neighbours))
        weights = torch.zeros_like(neighbours.distances)
        weights[:, : weighted.distances.shape[1]] = neighbour_weights(weighted.distances, head.settings.temperature)
        model_probs = head.head(x[:, : head.stream_dim]).float().softmax(-1)[0]
        neighbour_probs = head.distribution(weighted)[0].float()
        mixed_probs = torch.lerp(model_probs, neighbour_probs, head.settings.weight)
    best = mixed_probs.topk(min(num_guesses, head.classes)).indices.tolist()
    rows = zip(*(values[0, :num_neighbours].tolist() for values in (neighbours.entries, neighbours.distances, weights)))
    probs = (model_probs, neighbour_probs, mixed_probs)
    guesses = tuple(TokenGuess(tokenizer.token(t), *(float(values[t]) for values in probs)) for t in best)
    views = tuple(_view_neighbour(head.store, tokenizer, *row) for row in rows if row[0] >= 0)
    return PromptNeighbours(prompt, guesses, views)


def _view_neighbour(
    store: Datastore, tokenizer: Tokenizer, entry: int, distance: float, weight: float
) -> NeighbourView:
    context, token, continuation = store.context(entry, CONTEXT_TOKENS, CONTINUATION_TOKENS)
    return NeighbourView(
        entry, tokenizer.decode(context), tokenizer.token(token), tokenizer.decode(continuation), distance, weight
    )
