"""Free mixing: a language model from parts by name, for grids of ablations."""

from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

from torch import nn

from manyformer.attention import Attention
from manyformer.core import Layer
from manyformer.feedforward import FeedForward, GatedFeedForward, chunked
from manyformer.kernels import DynamicRotaryKernel, Kernel, LSHKernel, SoftmaxKernel
from manyformer.kernels import LinearKernel as LinearAttention
from manyformer.kernels.features import (
    CosineReweightingFeatures,
    DPFPFeatures,
    EluPlusOneFeatures,
    FavorPlusFeatures,
    GeneralizedFavorFeatures,
    RandomFourierFeatures,
    TaylorFeatures,
)
from manyformer.kernels.memory_rules import DeltaRule, GatedRule
from manyformer.masks import Causal, Window, fixed_pattern, strided_pattern, union
from manyformer.models import ClassHead, LanguageModel, TokenEmbedding
from manyformer.position import (
    AlibiPosition,
    DistanceAwarePosition,
    DynamicNTKRotaryScaling,
    LearnedPosition,
    LinearRotaryScaling,
    NoPosition,
    NTKRotaryScaling,
    Position,
    RotaryPosition,
    ShawPosition,
    SinusoidalPosition,
    T5BiasPosition,
    TransformerXLBiases,
    TransformerXLPosition,
    YaRNRotaryScaling,
)
from manyformer.recipes.bigbird import past
from manyformer.recipes.registry import recipe
from manyformer.recipes.rfa import FLOOR as RFA_FLOOR
from manyformer.recipes.stacks import NormOrder, ResidualStreams, stack

PositionName = Literal[
    "sinusoid",
    "learned",
    "none",
    "rope",
    "rope-linear",
    "rope-ntk",
    "rope-dynamic",
    "rope-yarn",
    "xl",
    "da",
    "alibi",
    "t5",
    "shaw",
]
KernelName = Literal[
    "softmax",
    "window",
    "strided",
    "fixed",
    "random-blocks",
    "linear",
    "delta",
    "cosine",
    "taylor",
    "favor",
    "favor-relu",
    "rfa",
    "rfa-gate",
    "lsh",
]
FeedForwardName = Literal["relu", "gelu", "swiglu", "geglu"]
NormName = Literal["layer", "rms"]


class ComposeSizes(NamedTuple):
    """What positions and kernels may be built from; `width` is that of a head."""

    dim: int
    width: int
    heads: int
    kv_heads: int
    max_length: int
    stretch: float


POSITIONS: dict[PositionName, Callable[[ComposeSizes], Callable[[], Position]]] = {
    "sinusoid": lambda sizes: lambda: SinusoidalPosition(sizes.dim),
    "learned": lambda sizes: lambda: LearnedPosition(sizes.dim, sizes.max_length),
    "none": lambda sizes: NoPosition,
    "rope": lambda sizes: _shared(RotaryPosition(sizes.width)),
    "rope-linear": lambda sizes: _shared(RotaryPosition(sizes.width, scaling=LinearRotaryScaling(sizes.stretch))),
    "rope-ntk": lambda sizes: _shared(RotaryPosition(sizes.width, scaling=NTKRotaryScaling(sizes.stretch))),
    "rope-yarn": lambda sizes: _shared(
        RotaryPosition(sizes.width, scaling=YaRNRotaryScaling(sizes.stretch, sizes.max_length))
    ),
    "xl": lambda sizes: _xl(sizes),
    "da": lambda sizes: lambda: DistanceAwarePosition(sizes.heads),
    "alibi": lambda sizes: _shared(AlibiPosition(sizes.heads)),
    # the paper has one table for all layers
    "t5": lambda sizes: _shared(T5BiasPosition(sizes.heads, sides="past")),
    "shaw": lambda sizes: lambda: ShawPosition(sizes.width, sides="past"),
    # what its angles are depends on the query, so the kernel turns the keys
    "rope-dynamic": lambda sizes: NoPosition,
}
"""From sizes to what makes the position of the embedding, or of one layer's attention after the other."""

FEATURES = 4
"""Random features for each channel of a head."""

WINDOW = 128
"""Positions in a window; blocks and strides of the other patterns are a quarter of it."""

BUCKETS = 16
"""Buckets that each round of hashing has."""

KERNELS: dict[KernelName, Callable[[ComposeSizes], Kernel]] = {
    "softmax": lambda sizes: SoftmaxKernel(Causal()),
    "window": lambda sizes: SoftmaxKernel(Window(WINDOW)),
    "strided": lambda sizes: SoftmaxKernel(union(strided_pattern(WINDOW // 4))),
    "fixed": lambda sizes: SoftmaxKernel(union(fixed_pattern(WINDOW // 4, WINDOW // 16))),
    "random-blocks": lambda sizes: SoftmaxKernel(past(WINDOW // 4, 2, -(-sizes.max_length // (WINDOW // 4)), 0)),
    "linear": lambda sizes: LinearAttention(EluPlusOneFeatures(), Causal()),
    "delta": lambda sizes: LinearAttention(DPFPFeatures(), Causal(), rule=DeltaRule()),
    "cosine": lambda sizes: LinearAttention(CosineReweightingFeatures(sizes.max_length), Causal()),
    "taylor": lambda sizes: LinearAttention(TaylorFeatures(), Causal()),
    "favor": lambda sizes: LinearAttention(
        FavorPlusFeatures(sizes.width, FEATURES * sizes.width, redraw=1000), Causal()
    ),
    "favor-relu": lambda sizes: LinearAttention(
        GeneralizedFavorFeatures(sizes.width, FEATURES * sizes.width, redraw=1000), Causal()
    ),
    "rfa": lambda sizes: LinearAttention(_fourier(sizes), Causal(), floor=RFA_FLOOR),
    "rfa-gate": lambda sizes: LinearAttention(_fourier(sizes), Causal(), rule=GatedRule(), floor=RFA_FLOOR),
    "lsh": lambda sizes: LSHKernel(buckets=BUCKETS, chunk=WINDOW // 4, rounds=4),
}

FEEDFORWARDS: dict[FeedForwardName, Callable[[int, int | None], Layer]] = {
    "relu": FeedForward,
    "gelu": lambda dim, hidden: FeedForward(dim, hidden, activation=nn.GELU()),
    "swiglu": GatedFeedForward,
    "geglu": lambda dim, hidden: GatedFeedForward(dim, hidden, activation=nn.GELU()),
}

NORMS: dict[NormName, Callable[[int], nn.Module]] = {"layer": nn.LayerNorm, "rms": nn.RMSNorm}


@recipe(
    "Any mixture of parts",
    paper="none: a bench for comparing parts",
    summary="Every part by name, so that one of them can be changed and the rest kept.",
    task="language-model",
    causal=True,
    incremental_decoding=True,
    cost="that of its parts",
    reasons={"cross_attention": "a language model reads one sequence only"},
)
def compose(
    vocab: int = 256,
    dim: int = 256,
    depth: int = 4,
    heads: int = 4,
    kv_heads: int | None = None,
    ff_dim: int | None = None,
    max_length: int = 1024,
    position: PositionName = "sinusoid",
    kernel: KernelName = "softmax",
    feedforward: FeedForwardName = "gelu",
    norm_order: NormOrder = "pre",
    norm_kind: NormName = "layer",
    dropout: float = 0.0,
    length_scale: float = 4.0,
    residual_streams: ResidualStreams = "plain",
    ff_chunk: int | None = None,
) -> LanguageModel:
    """A causal language model; `max_length` is what learned positions and "cosine" need, the others take any length.

    "rope" is rotary (RoFormer's causal form); its scalings reach `length_scale` times `max_length`, the length trained
    for."""
    sizes = ComposeSizes(dim, dim // heads, heads, kv_heads or heads, max_length, length_scale)
    make = POSITIONS[position](sizes)
    embedded = make()
    inside = bool(embedded.required_seams() - {"embed"})

    def attend() -> Kernel:
        found = KERNELS[kernel](sizes)
        dynamic = position == "rope-dynamic"
        return (
            DynamicRotaryKernel(found, sizes.width, DynamicNTKRotaryScaling(length_scale, max_length))
            if dynamic
            else found
        )

    def layer() -> dict[str, Layer]:
        return {
            "attention": Attention(dim, heads, attend(), kv_heads=kv_heads, position=make() if inside else None),
            "ff": chunked(FEEDFORWARDS[feedforward](dim, ff_dim), ff_chunk),
        }

    embed = TokenEmbedding(vocab, dim, position=None if inside else embedded, scale=dim**0.5, dropout=dropout)
    kind = partial(NORMS[norm_kind], dim)
    body = stack(depth, layer, order=norm_order, norm=kind, dropout=dropout, streams=residual_streams)
    return LanguageModel(embed, body, ClassHead(dim, vocab, tied=embed.token))


def _fourier(sizes: ComposeSizes) -> RandomFourierFeatures:
    return RandomFourierFeatures(sizes.width, FEATURES * sizes.width, heads=sizes.kv_heads, redraw=1)


def _xl(sizes: ComposeSizes) -> Callable[[], Position]:
    """Transformer-XL's positions, all layers with the same biases, as in the paper."""
    biases = TransformerXLBiases(sizes.heads, sizes.width)
    return lambda: TransformerXLPosition(sizes.dim, sizes.heads, width=sizes.width, biases=biases)


def _shared(position: Position) -> Callable[[], Position]:
    """One part for all layers, so that they share its tables."""
    return lambda: position
