"""The Memorizing Transformer: one layer also attends to keys retrieved from a large kNN memory."""

import math
from functools import partial
from typing import Annotated, Literal

from annotated_types import Gt, Lt

from manyformer.base.errors import UserError
from manyformer.models import LanguageModel
from manyformer.models.tasks.language_modelling import LANGUAGE_MODELLING
from manyformer.nn.attention.kv_cache import SegmentMemorySource
from manyformer.nn.core import Layer
from manyformer.nn.kernels.composed_kernels import QKNormKernel
from manyformer.nn.kernels.kernel import Kernel
from manyformer.nn.masks import Causal, Window
from manyformer.nn.positions import T5BiasPosition
from manyformer.nn.softmax.softmax_kernel import SoftmaxKernel
from manyformer.nn.sparse.memorizing_kernel import (
    ExactSearch,
    FaissSearch,
    GatedCombiner,
    JointSoftmaxCombiner,
    MemorizingKernel,
)
from manyformer.recipes.parts.baselines import NormOrder
from manyformer.recipes.parts.keywords import ClampLength, MemoryContext, MemoryLength, PositiveSize
from manyformer.recipes.parts.registry import recipe
from manyformer.recipes.transformer_xl import BiasSharing, XLAttentionMaker, xl_model, xl_positions

KNNMemorySize = Annotated[
    PositiveSize | None,
    "number of key-value pairs that the kNN memory holds for each row and head, the latest ones; null means no "
    "kNN memory",
]
RetrievedPairCount = Annotated[PositiveSize, "number of pairs that each query retrieves from the kNN memory"]
AddedBlockLength = Annotated[PositiveSize, "number of tokens that are added to the kNN memory at a time"]
MemoryLayer = Annotated[
    PositiveSize | None, "the layer with the kNN memory, counted from 1; null means three quarters up"
]
CombinationKind = Annotated[
    Literal["gate", "joint"],
    "how local and retrieved attention are combined: a learned gate for each head, or one joint softmax",
]
InitialGate = Annotated[Annotated[float, Gt(0), Lt(1)], "initial weight of retrieved attention"]
SearchKind = Annotated[
    Literal["exact", "faiss"], "exact search over all keys of the kNN memory, or an approximate faiss index"
]
QKSimilarity = Annotated[
    Literal["cosine", "product"],
    "score of a query and a key, local or retrieved: cosine similarity with a learned scale for each head, or the "
    "scaled dot product",
]
RelativePosition = Annotated[
    Literal["t5", "xl"], "relative positions: biases for buckets of distances (t5), or Transformer-XL's (xl)"
]


@recipe(
    "Memorizing Transformer",
    paper="Wu et al. 2022, Memorizing Transformers, arXiv:2203.08913",
    summary="One layer also attends to the nearest of very many cached keys, with a learned gate for each head.",
    task=LANGUAGE_MODELLING,
    family="memory",
    constant_state=True,
    cost="O(l (l + m) d + l d^2) per layer, m tokens of memory; in one layer also O(l M d) to find k of M pairs",
    tiny_keywords={"memory_length": 6, "knn_memory_size": 12, "neighbours": 3, "block": 4, "layer": 1},
)
def memorizing_transformer(
    vocab: int = 256,
    dim: int = 512,
    depth: int = 12,
    heads: int = 8,
    ff_dim: int | None = None,
    memory_length: MemoryLength = 512,
    knn_memory_size: KNNMemorySize = 8192,
    neighbours: RetrievedPairCount = 32,
    block: AddedBlockLength = 512,
    layer: MemoryLayer = None,
    combine: CombinationKind = "gate",
    gate: InitialGate = 0.5,
    search: SearchKind = "exact",
    qk_similarity: QKSimilarity = "cosine",
    position: RelativePosition = "t5",
    context: MemoryContext = "same-length",
    clamp_length: ClampLength = None,
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
    if (position, qk_similarity) == ("xl", "cosine"):
        raise UserError("position 'xl' needs dot products; set qk_similarity to product, or position to t5")
    mask = Causal() if context == "growing" else Window(memory_length)

    def attention(number: int, make_attention: XLAttentionMaker) -> Layer:
        # normalized queries and keys bring a learned scale, in place of 1 / sqrt(e)
        local_kernel = SoftmaxKernel(mask, scale=1.0 if qk_similarity == "cosine" else None)
        kernel: Kernel = local_kernel
        # one layer alone: others would each need a memory and a search of their own
        if knn_memory_size is not None and number + 1 == memory_layer:
            # the gate is a sigmoid of its bias: this one opens it to `gate` at first
            gated = GatedCombiner(heads, bias=math.log(gate / (1 - gate)))
            kernel = MemorizingKernel(
                local_kernel,
                heads,
                dim // heads,
                size=knn_memory_size,
                neighbours=neighbours,
                block=block,
                combine=JointSoftmaxCombiner() if combine == "joint" else gated,
                search=ExactSearch() if search == "exact" else FaissSearch(),
            )
        if qk_similarity == "cosine":
            kernel = QKNormKernel(kernel, heads)
        return make_attention(kernel, SegmentMemorySource(memory_length, dim))

    # T5 biases have a table for each layer, as in the authors' code
    t5_positions = partial(T5BiasPosition, heads, direction="past")
    positions = t5_positions if position == "t5" else xl_positions(dim, heads, clamp_length, bias_sharing, dropout)
    return xl_model(vocab, dim, depth, heads, ff_dim, attention, positions, dropout, norm_order)
