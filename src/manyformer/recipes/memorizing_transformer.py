"""The Memorizing Transformer: one layer also attends to keys retrieved from a large kNN memory."""

import math
from collections.abc import Callable
from typing import Literal

from manyformer.core import Layer
from manyformer.errors import UserError
from manyformer.kernels import Kernel, MemorizingKernel, QKNormKernel, SoftmaxKernel
from manyformer.kernels.key_search import ExactSearch, FaissSearch, KeySearch
from manyformer.kernels.memorizing_kernel import GatedCombiner, JointSoftmaxCombiner, MemoryCombiner
from manyformer.masks import Causal, Window
from manyformer.models import LanguageModel
from manyformer.position import Position, T5BiasPosition
from manyformer.recipes.registry import recipe
from manyformer.recipes.stacks import NormOrder
from manyformer.recipes.transformer_xl import BiasSharing, XLAttentionParts, check_heads, xl_model, xl_positions
from manyformer.sources import SegmentMemorySource
from manyformer.tasks.language_modelling import LANGUAGE_MODELLING

SEARCHES: dict[Literal["exact", "faiss"], Callable[[], KeySearch]] = {"exact": ExactSearch, "faiss": FaissSearch}


@recipe(
    "Memorizing Transformer",
    paper="Wu et al. 2022, Memorizing Transformers, arXiv:2203.08913",
    summary="One layer also attends to the nearest of very many cached keys, with a learned gate for each head.",
    task=LANGUAGE_MODELLING,
    causal=True,
    incremental_decoding=True,
    cost="O(l (l + m) d + l d^2) per layer, m tokens of memory; in one layer also O(l M d) to find k of M pairs",
    tiny_keywords={"memory_length": 6, "knn_memory_size": 12, "neighbours": 3, "block": 4, "layer": 1},
)
def memorizing_transformer(
    vocab: int = 256,
    dim: int = 512,
    depth: int = 12,
    heads: int = 8,
    ff_dim: int | None = None,
    memory_length: int = 512,
    knn_memory_size: int | None = 8192,
    neighbours: int = 32,
    block: int = 512,
    layer: int | None = None,
    combine: Literal["gate", "joint"] = "gate",
    gate: float = 0.5,
    search: Literal["exact", "faiss"] = "exact",
    qk_similarity: Literal["cosine", "product"] = "cosine",
    position: Literal["t5", "xl"] = "t5",
    context: Literal["growing", "same-length"] = "same-length",
    clamp_length: int | None = None,
    bias_sharing: BiasSharing = "all-layers",
    dropout: float = 0.1,
    norm_order: NormOrder = "pre",
) -> LanguageModel:
    """The paper's size with `dim=1024`; by default `layer` (from 1) is three quarters up, the paper's 9th of 12.

    `knn_memory_size` may be larger in evaluation than in training, as may `neighbours` and `memory_length`; None is the
    model without a kNN memory. Documents are added to it in blocks of `block` tokens, however the input is divided into
    segments. Layers cache their inputs, as Transformer-XL does, where the authors' code caches keys. The first version
    of the paper had `combine="joint"` and `qk_similarity="product"`; with `position="xl"` it is a Transformer-XL with a
    kNN memory, and `clamp_length` and `bias_sharing` are as there. `gate` is the initial weight of the kNN memory. Both
    memories need data with `packing: contiguous`."""
    memory_layer = depth - depth // 4 if layer is None else layer
    if memory_layer > depth:
        raise UserError(f"layer ({layer}) must be at most depth ({depth})")
    if not 0 < gate < 1:
        raise UserError(f"gate ({gate}) must be above 0 and below 1")
    if (position, qk_similarity) == ("xl", "cosine"):
        raise UserError("position 'xl' needs dot products; set qk_similarity to product, or position to t5")
    check_heads(dim, heads)
    make_combiner: Callable[[], MemoryCombiner] = (
        JointSoftmaxCombiner if combine == "joint" else lambda: GatedCombiner(heads, bias=math.log(gate / (1 - gate)))
    )

    def kernel(layer_number: int) -> Kernel:
        mask = Causal() if context == "growing" else Window(memory_length)
        local_kernel = SoftmaxKernel(mask, scale=1.0 if qk_similarity == "cosine" else None)
        sizes = {"neighbours": neighbours, "block": block}
        full_kernel: Kernel = local_kernel
        if knn_memory_size is not None and layer_number == memory_layer:
            parts = {**sizes, "combine": make_combiner(), "search": SEARCHES[search]()}
            full_kernel = MemorizingKernel(local_kernel, heads, dim // heads, size=knn_memory_size, **parts)  # type: ignore[arg-type]
        return QKNormKernel(full_kernel, heads) if qk_similarity == "cosine" else full_kernel

    def attention(parts: XLAttentionParts) -> Layer:
        return parts.attention(kernel(parts.number + 1), SegmentMemorySource(memory_length, dim))

    return xl_model(
        vocab,
        dim,
        depth,
        heads,
        ff_dim,
        attention,
        _t5_positions(heads) if position == "t5" else xl_positions(dim, heads, clamp_length, bias_sharing, dropout),
        dropout,
        norm_order,
    )


def _t5_positions(heads: int) -> Callable[[], Position]:
    """T5 biases with a table for each layer, as in the authors' code."""
    return lambda: T5BiasPosition(heads, direction="past")
