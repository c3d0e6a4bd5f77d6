"""Pages that the tests look at: small models, and maps written by hand."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread
from typing import Any

import torch
from torch import Tensor

import manyformer as mf
from manyformer.analysis.figures.attention_maps import AttentionMap
from manyformer.analysis.viewer.model_view import ModelView
from manyformer.analysis.viewer.server import ServedModel, ViewServer
from manyformer.data.tokenizers.saved_tokenizers import train_tokenizer
from perturbing import perturb

ALPHABET = "abcdefgh \n"


def trained(name: str, **keywords: Any) -> Any:
    """A model with random weights and a tokenizer of letters."""
    tokenizer = train_tokenizer("char", [ALPHABET])
    model = mf.build(name, **{"vocab": tokenizer.vocab, "dim": 16, "depth": 2, "heads": 2, **keywords})
    perturb(model, 0.3)
    model.tokenizer = tokenizer
    return model.eval()


@contextmanager
def served(*models: ServedModel) -> Iterator[ViewServer]:
    """A server that answers inside the block."""
    with ViewServer(models, "abc") as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def random_weights(heads: int, length: int, *, causal: bool = False) -> Tensor:
    """Softmax of random scores."""
    scores = torch.randn(heads, length, length)
    visible = torch.ones(length, length, dtype=torch.bool)
    return scores.masked_fill(~(visible.tril() if causal else visible), -torch.inf).softmax(-1)


def self_map(weights: Tensor, tokens: tuple[str, ...] | None = None, part: str = "body.0.attention") -> AttentionMap:
    """A map of self-attention with these weights."""
    labels = tokens or tuple(f"token{number}" for number in range(weights.shape[-1]))
    return AttentionMap(part, labels, labels, weights)


def view_of(*maps: AttentionMap, **fields: Any) -> ModelView:
    """What is shown of a model with these maps."""
    return ModelView(fields.pop("name", "run"), "Model, 12 parameters", list(maps), {}, **fields)
