"""The Compressive Transformer: states evicted from the memory are compressed into fewer slots."""

from collections.abc import Callable
from functools import partial
from typing import Annotated, Literal

from manyformer.base.errors import UserError
from manyformer.models import LanguageModel
from manyformer.models.tasks.language_modelling import LANGUAGE_MODELLING
from manyformer.nn.attention.compressive_attention import (
    AttentionReconstructionLoss,
    AutoEncodingLoss,
    CompressionLoss,
    CompressiveAttention,
    ConvolutionCompression,
    MaxPoolCompression,
    MeanPoolCompression,
    MemoryCompression,
    MostAttendedCompression,
    ThroughTimeLoss,
)
from manyformer.nn.attention.kv_cache import PrefixSource
from manyformer.nn.core import Layer
from manyformer.nn.masks import Causal
from manyformer.nn.softmax.softmax_kernel import SoftmaxKernel
from manyformer.recipes.parts.baselines import NormOrder
from manyformer.recipes.parts.keywords import ClampLength, MemoryLength, PositiveSize
from manyformer.recipes.parts.registry import recipe
from manyformer.recipes.transformer_xl import BiasSharing, XLAttentionMaker, xl_model, xl_positions

CompressionName = Annotated[
    Literal["max", "mean", "convolution", "dilated", "most-used"], "function that compresses evicted memories"
]
TeacherName = Annotated[
    Literal["usual", "attention", "auto-encoding", "through-time"],
    "training loss of a learned compression; usual means attention reconstruction where the compression has weights",
]

COMPRESSIONS: dict[CompressionName, Callable[[int, int], MemoryCompression]] = {
    "max": lambda dim, rate: MaxPoolCompression(rate),
    "mean": lambda dim, rate: MeanPoolCompression(rate),
    "convolution": ConvolutionCompression,
    "dilated": partial(ConvolutionCompression, dilation=2),
    "most-used": lambda dim, rate: MostAttendedCompression(rate),
}

COMPRESSION_LOSSES: dict[TeacherName, Callable[[int, int], CompressionLoss]] = {
    "usual": lambda dim, rate: AttentionReconstructionLoss(),
    "attention": lambda dim, rate: AttentionReconstructionLoss(),
    "auto-encoding": AutoEncodingLoss,
    "through-time": lambda dim, rate: ThroughTimeLoss(),
}

LEARNED_COMPRESSIONS = ("convolution", "dilated")


@recipe(
    "Compressive Transformer",
    paper="Rae et al. 2020, Compressive Transformers for Long-Range Sequence Modelling, arXiv:1911.05507",
    summary="States evicted from Transformer-XL's memory are compressed and attended to for several times as long.",
    task=LANGUAGE_MODELLING,
    family="memory",
    cost="O(l (l + m + c) d + l d^2) per layer, m tokens of memory, c slots of `rate` tokens each",
    reasons={"incremental_decoding": "compressed states are less exact than those of one pass over the whole sequence"},
    tiny_keywords={"memory_length": 8, "compressed_length": 6, "rate": 2},
)
def compressive_transformer(
    vocab: int = 256,
    dim: int = 512,
    depth: int = 12,
    heads: int = 8,
    ff_dim: int | None = None,
    memory_length: MemoryLength = 512,
    compressed_length: Annotated[PositiveSize, "number of compressed memory slots of a layer"] = 512,
    rate: Annotated[PositiveSize, "number of tokens compressed into one slot"] = 3,
    compression: CompressionName = "convolution",
    teacher: TeacherName = "usual",
    block: Annotated[
        PositiveSize | None, "number of tokens that are compressed at a time, a multiple of rate; null means rate"
    ] = None,
    clamp_length: ClampLength = None,
    bias_sharing: BiasSharing = "all-layers",
    dropout: float = 0.1,
    norm_order: NormOrder = "post",
) -> LanguageModel:
    """Transformer-XL (see `transformer_xl`) with a compressed memory; `dim=1024, depth=24` is the paper's enwik8 size.

    There, segments and memory have 768 tokens and there are 1152 slots. A convolution is trained by attention
    reconstruction by default, the paper's best; pooling and most-used tokens have no weights. The memories need data
    with `packing: contiguous`; without a state a sequence is one segment of any length."""
    if teacher != "usual" and compression not in LEARNED_COMPRESSIONS:
        raise UserError(f"compression '{compression}' has no weights to train; leave teacher out")
    make_loss = None
    if compression in LEARNED_COMPRESSIONS:
        make_loss = COMPRESSION_LOSSES[teacher]

    def attention(number: int, make_attention: XLAttentionMaker) -> Layer:
        return CompressiveAttention(
            # the inner attention has no cache of its own: both memories stand in front of the segment
            make_attention(SoftmaxKernel(Causal()), PrefixSource()),
            COMPRESSIONS[compression](dim, rate),
            memory_length=memory_length,
            compressed_length=compressed_length,
            # compressions with weights learn from a loss of their own, whose gradient does not reach the model
            teacher=None if make_loss is None else make_loss(dim, rate),
            block=block,
        )

    positions = xl_positions(dim, heads, clamp_length, bias_sharing, dropout)
    return xl_model(vocab, dim, depth, heads, ff_dim, attention, positions, dropout, norm_order)
