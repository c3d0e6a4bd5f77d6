"""The Memorizing Transformer: one layer looks up keys of long ago."""

import math
from collections.abc import Callable
from typing import Literal

from manyformer.core import Layer
from manyformer.errors import UserError
from manyformer.kernels import Kernel, Memorizing, Normed, Softmax
from manyformer.kernels.memorizing import Combine, Gate, Joint
from manyformer.kernels.search import Exact, Faiss, Search
from manyformer.masks import Causal, Window
from manyformer.models import LanguageModel
from manyformer.position import Position, T5Buckets
from manyformer.recipes.registry import recipe
from manyformer.recipes.stacks import NormOrder
from manyformer.recipes.transformer_xl import Biases, Parts, check_heads, xl_model, xl_positions
from manyformer.sources import Remembered

SEARCHES: dict[Literal["exact", "faiss"], Callable[[], Search]] = {"exact": Exact, "faiss": Faiss}


@recipe(
    "Memorizing Transformer",
    paper="Wu et al. 2022, Memorizing Transformers, arXiv:2203.08913",
    new="One layer also attends to the most similar of very many old keys, each head by a gate of its own.",
    task="language-model",
    causal=True,
    streams=True,
    cost="O(l (l + m) d + l d^2) per layer, m tokens remembered; in one layer also O(l M d) to find k of M pairs",
    because={"cross": "a language model reads one sequence only"},
    small={"remembered": 6, "memory": 12, "neighbours": 3, "block": 4, "layer": 1},
)
def memorizing_transformer(
    vocab: int = 256,
    dim: int = 512,
    depth: int = 12,
    heads: int = 8,
    hidden: int | None = None,
    remembered: int = 512,
    memory: int | None = 8192,
    neighbours: int = 32,
    block: int = 512,
    layer: int | None = None,
    combine: Literal["gate", "joint"] = "gate",
    gate: float = 0.5,
    search: Literal["exact", "faiss"] = "exact",
    scores: Literal["cosine", "product"] = "cosine",
    position: Literal["t5", "xl"] = "t5",
    view: Literal["growing", "equal"] = "equal",
    clamp: int | None = None,
    biases: Biases = "shared",
    dropout: float = 0.1,
    norm: NormOrder = "pre",
) -> LanguageModel:
    """Of the paper's size with `dim=1024`; `layer` (from 1) is its 9th of 12, as far up in others, unless given.

    `memory` may be larger in evaluation than in training, as may `neighbours` and `remembered`; None is the model
    without one. A document enters it in pieces of `block` tokens, so that any pieces may be read. Layers remember their
    inputs, as Transformer-XL does, where the authors' code keeps keys. The first version of the paper had
    `combine="joint"` and `scores="product"`; with `position="xl"` it is a Transformer-XL with a memory, and `clamp` and
    `biases` are as there. `gate` is what the memory counts at first. Data in lanes makes use of both memories.
    """
    number = depth - depth // 4 if layer is None else layer
    if number > depth:
        raise UserError(f"layer ({layer}) must be at most depth ({depth})")
    if not 0 < gate < 1:
        raise UserError(f"gate ({gate}) must be above 0 and below 1")
    if (position, scores) == ("xl", "cosine"):
        raise UserError("position 'xl' needs products as they are; set scores to product, or position to t5")
    check_heads(dim, heads)
    joined: Callable[[], Combine] = (
        Joint if combine == "joint" else lambda: Gate(heads, bias=math.log(gate / (1 - gate)))
    )

    def kernel(here: int) -> Kernel:
        seen = Causal() if view == "growing" else Window(remembered)
        near = Softmax(seen, scale=1.0 if scores == "cosine" else None)
        sizes = {"neighbours": neighbours, "block": block}
        found: Kernel = near
        if memory is not None and here == number:
            parts = {"combine": joined(), "search": SEARCHES[search]()}
            found = Memorizing(near, heads, dim // heads, size=memory, **sizes, **parts)  # type: ignore[arg-type]
        return Normed(found, heads) if scores == "cosine" else found

    def attention(parts: Parts) -> Layer:
        return parts.attention(kernel(parts.number + 1), Remembered(remembered, dim))

    return xl_model(
        vocab,
        dim,
        depth,
        heads,
        hidden,
        attention,
        _t5(heads) if position == "t5" else xl_positions(dim, heads, clamp, biases, dropout),
        dropout,
        norm,
    )


def _t5(heads: int) -> Callable[[], Position]:
    """A table for each layer, as the authors' code has."""
    return lambda: T5Buckets(heads, sides="past")
