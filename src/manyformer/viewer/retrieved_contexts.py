"""The contexts that a kNN-LM retrieves for each token of a text, as a map beside those of attention."""

from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from manyformer.core import no_watch
from manyformer.data import Tokenizer
from manyformer.datastore.inspect_prompt import CONTEXT_TOKENS
from manyformer.datastore.knn_head import KNNHead, neighbour_weights
from manyformer.models import Model
from manyformer.tasks import TextPass
from manyformer.view.attention_maps import AttentionMap
from manyformer.view.text_passes import full_token_labels, visible_text

SHOWN_NEIGHBOURS = 4
"""The nearest neighbours of a token that have columns of their own."""


def retrieved_map(model: Model, text_pass: TextPass) -> AttentionMap | None:
    """The weights of the nearest contexts of each token, and the text of these; None for a model without a datastore.

    A column is an entry of the datastore: the end of its context and the token that followed. The weights are shares
    among all neighbours that the model uses, of which each token shows its `SHOWN_NEIGHBOURS` nearest.
    """
    head = getattr(model, "head", None)
    if not isinstance(head, KNNHead) or not isinstance(model.tokenizer, Tokenizer):
        return None
    neighbours = head.store.search(head.key(_head_input(head, text_pass)), head.settings.neighbours)
    weights = neighbour_weights(neighbours.distances, head.settings.temperature)[:, :SHOWN_NEIGHBOURS].float().cpu()
    nearest = neighbours.entries[:, :SHOWN_NEIGHBOURS].cpu()
    entries, columns = torch.unique(nearest, return_inverse=True)
    dense = weights.new_zeros(len(weights), len(entries)).scatter_add_(1, columns, weights)
    # entry -1 is the absence of a neighbour
    entries, dense = entries[entries >= 0], dense[:, entries >= 0]
    labels = tuple(_entry_text(head, model.tokenizer, entry) for entry in entries.tolist())
    rows = text_pass.labels
    shown = dense[None, : len(rows)]
    return AttentionMap("datastore", rows, labels, shown, keys="contexts")


def _head_input(head: KNNHead, text_pass: TextPass) -> Tensor:
    """What the head reads in the pass, without axes of batches."""
    inputs: list[Tensor] = []

    def record(module: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
        inputs.append(arguments[0])

    with head.register_forward_pre_hook(record):
        text_pass.run(no_watch)
    return inputs[-1]


def _entry_text(head: KNNHead, tokenizer: Tokenizer, entry: int) -> str:
    context, token, _ = head.store.context(entry, CONTEXT_TOKENS, 0)
    texts: list[str] = []
    for is_ordinary, group in groupby(context, lambda number: bool(tokenizer.is_ordinary[number])):
        tokens = list(group)
        # decoded together: a token alone may be a part of a character, or of a word
        texts += [visible_text(tokenizer.decode(tokens))] if is_ordinary else full_token_labels(tokens, tokenizer)
    return f"{''.join(texts)} → {full_token_labels([token], tokenizer)[0]}"
