"""The Compressive Transformer: what leaves the memory stays a while longer as fewer slots."""

from collections.abc import Callable
from functools import partial
from typing import Literal

from manyformer.core import Layer
from manyformer.errors import UserError
from manyformer.kernels import Softmax
from manyformer.masks import Causal
from manyformer.mixers.compression import (
    AttentionReconstruction,
    AutoEncoding,
    Compression,
    Convolution,
    MaxPooling,
    MeanPooling,
    MostUsed,
    Teacher,
    ThroughTime,
)
from manyformer.mixers.compressive import Compressive
from manyformer.models import LanguageModel
from manyformer.recipes.registry import recipe
from manyformer.recipes.stacks import NormOrder
from manyformer.recipes.transformer_xl import Biases, Parts, xl_model, xl_positions
from manyformer.sources import After

CompressionName = Literal["max", "mean", "convolution", "dilated", "most-used"]
TeacherName = Literal["usual", "attention", "auto-encoding", "through-time"]

COMPRESSIONS: dict[CompressionName, Callable[[int, int], Compression]] = {
    "max": lambda dim, rate: MaxPooling(rate),
    "mean": lambda dim, rate: MeanPooling(rate),
    "convolution": Convolution,
    "dilated": partial(Convolution, dilation=2),
    "most-used": lambda dim, rate: MostUsed(rate),
}

TEACHERS: dict[TeacherName, Callable[[int, int], Teacher]] = {
    "usual": lambda dim, rate: AttentionReconstruction(),
    "attention": lambda dim, rate: AttentionReconstruction(),
    "auto-encoding": AutoEncoding,
    "through-time": lambda dim, rate: ThroughTime(),
}

LEARNT = ("convolution", "dilated")


@recipe(
    "Compressive Transformer",
    paper="Rae et al. 2020, Compressive Transformers for Long-Range Sequence Modelling, arXiv:1911.05507",
    new="What leaves the memory of Transformer-XL is compressed, and attended to for several times as long.",
    task="language-model",
    causal=True,
    cost="O(l (l + m + c) d + l d^2) per layer, m tokens remembered, c slots that stand for `rate` tokens each",
    because={
        "cross": "a language model reads one sequence only",
        "streams": "what has been compressed is known less exactly than in one pass over everything",
    },
    small={"remembered": 8, "compressed": 6, "rate": 2},
)
def compressive_transformer(
    vocab: int = 256,
    dim: int = 512,
    depth: int = 12,
    heads: int = 8,
    hidden: int | None = None,
    remembered: int = 512,
    compressed: int = 512,
    rate: int = 3,
    compression: CompressionName = "convolution",
    teacher: TeacherName = "usual",
    block: int | None = None,
    clamp: int | None = None,
    biases: Biases = "shared",
    dropout: float = 0.1,
    norm: NormOrder = "post",
) -> LanguageModel:
    """Transformer-XL (see `transformer_xl`) with slots; of the paper's size for enwik8 with `dim=1024, depth=24`.

    There, segments and memory have 768 tokens and there are 1152 slots. A convolution learns from attention
    reconstruction unless told otherwise, the paper's best; pooling and most-used tokens have nothing to learn. Data in
    lanes makes use of the memories; without a state a sequence is one segment, however long it is.
    """
    if teacher != "usual" and compression not in LEARNT:
        raise UserError(f"compression '{compression}' has no weights to be taught; leave teacher out")
    taught = TEACHERS[teacher] if compression in LEARNT else None

    def attention(parts: Parts) -> Layer:
        return Compressive(
            parts.attention(Softmax(Causal()), After()),
            COMPRESSIONS[compression](dim, rate),
            remembered=remembered,
            compressed=compressed,
            teacher=None if taught is None else taught(dim, rate),
            block=block,
        )

    positions = xl_positions(dim, heads, clamp, biases, dropout)
    return xl_model(vocab, dim, depth, heads, hidden, attention, positions, dropout, norm)
