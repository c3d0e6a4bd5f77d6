"""A language model composed of parts chosen by name, for ablations."""

from collections.abc import Callable
from functools import partial
from typing import Annotated, Literal, NamedTuple

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
from manyformer.recipes.bigbird import causal_pattern
from manyformer.recipes.keywords import FeedForwardChunk
from manyformer.recipes.registry import recipe
from manyformer.recipes.rfa import FLOOR as RFA_FLOOR
from manyformer.recipes.stacks import NormOrder, ResidualStreams, stack
from manyformer.tasks.language_modelling import LANGUAGE_MODELLING

FeedForwardName = Annotated[Literal["relu", "gelu", "swiglu", "geglu"], "kind of feed-forward layer and activation"]
NormName = Annotated[Literal["layer", "rms"], "LayerNorm or RMSNorm"]


class ComposeSizes(NamedTuple):
    """The sizes that positions and kernels are built from."""

    dim: int
    head_dim: int
    heads: int
    kv_heads: int
    max_length: int
    length_scale: float


POSITIONS: dict[str, Callable[[ComposeSizes], Callable[[], Position]]] = {
    "sinusoid": lambda sizes: lambda: SinusoidalPosition(sizes.dim),
    "learned": lambda sizes: lambda: LearnedPosition(sizes.dim, sizes.max_length),
    "none": lambda sizes: NoPosition,
    "rope": lambda sizes: _shared_position(RotaryPosition(sizes.head_dim)),
    "rope-linear": lambda sizes: _shared_position(
        RotaryPosition(sizes.head_dim, scaling=LinearRotaryScaling(sizes.length_scale))
    ),
    "rope-ntk": lambda sizes: _shared_position(
        RotaryPosition(sizes.head_dim, scaling=NTKRotaryScaling(sizes.length_scale))
    ),
    "rope-yarn": lambda sizes: _shared_position(
        RotaryPosition(sizes.head_dim, scaling=YaRNRotaryScaling(sizes.length_scale, sizes.max_length))
    ),
    "xl": lambda sizes: _transformer_xl_position(sizes),
    "da": lambda sizes: lambda: DistanceAwarePosition(sizes.heads),
    "alibi": lambda sizes: _shared_position(AlibiPosition(sizes.heads)),
    # the paper shares one table among all layers
    "t5": lambda sizes: _shared_position(T5BiasPosition(sizes.heads, direction="past")),
    "shaw": lambda sizes: lambda: ShawPosition(sizes.head_dim, direction="past"),
    # its angles depend on the query, so the kernel rotates the keys
    "rope-dynamic": lambda sizes: NoPosition,
}
"""From sizes to a function that makes the position of the embedding, or of each layer's attention in turn.

A plug-in may add names, here and to `KERNELS`."""

FEATURES = 4
"""Random features for each channel of a head."""

WINDOW = 128
"""Positions in a window; blocks and strides of the other patterns are a quarter of it."""

BUCKETS = 16
"""Buckets of each hash round."""

KERNELS: dict[str, Callable[[ComposeSizes], Kernel]] = {
    "softmax": lambda sizes: SoftmaxKernel(Causal()),
    "window": lambda sizes: SoftmaxKernel(Window(WINDOW)),
    "strided": lambda sizes: SoftmaxKernel(union(strided_pattern(WINDOW // 4))),
    "fixed": lambda sizes: SoftmaxKernel(union(fixed_pattern(WINDOW // 4, WINDOW // 16))),
    "random-blocks": lambda sizes: SoftmaxKernel(
        causal_pattern(WINDOW // 4, 2, -(-sizes.max_length // (WINDOW // 4)), 0)
    ),
    "linear": lambda sizes: LinearAttention(EluPlusOneFeatures(), Causal()),
    "delta": lambda sizes: LinearAttention(DPFPFeatures(), Causal(), rule=DeltaRule()),
    "cosine": lambda sizes: LinearAttention(CosineReweightingFeatures(sizes.max_length), Causal()),
    "taylor": lambda sizes: LinearAttention(TaylorFeatures(), Causal()),
    "favor": lambda sizes: LinearAttention(
        FavorPlusFeatures(sizes.head_dim, FEATURES * sizes.head_dim, redraw=1000), Causal()
    ),
    "favor-relu": lambda sizes: LinearAttention(
        GeneralizedFavorFeatures(sizes.head_dim, FEATURES * sizes.head_dim, redraw=1000), Causal()
    ),
    "rfa": lambda sizes: LinearAttention(_fourier_features(sizes), Causal(), floor=RFA_FLOOR),
    "rfa-gate": lambda sizes: LinearAttention(_fourier_features(sizes), Causal(), rule=GatedRule(), floor=RFA_FLOOR),
    "lsh": lambda sizes: LSHKernel(num_buckets=BUCKETS, chunk_length=WINDOW // 4, num_hashes=4),
}

FEEDFORWARDS: dict[FeedForwardName, Callable[[int, int | None], Layer]] = {
    "relu": FeedForward,
    "gelu": lambda dim, hidden: FeedForward(dim, hidden, activation=nn.GELU()),
    "swiglu": GatedFeedForward,
    "geglu": lambda dim, hidden: GatedFeedForward(dim, hidden, activation=nn.GELU()),
}

PositionName = Annotated[str, POSITIONS, "kind of position encoding"]
KernelName = Annotated[str, KERNELS, "attention kernel"]

NORMS: dict[NormName, Callable[[int], nn.Module]] = {"layer": nn.LayerNorm, "rms": nn.RMSNorm}


@recipe(
    "Any mixture of parts",
    paper="none: a testbed for comparing parts",
    summary="Every part is chosen by name, so that one can be changed and the others kept.",
    task=LANGUAGE_MODELLING,
    cost="that of its parts",
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
    length_scale: Annotated[
        float, "factor by which scaled rotary positions exceed max_length; other positions ignore it"
    ] = 4.0,
    residual_streams: ResidualStreams = "plain",
    ff_chunk: FeedForwardChunk = None,
) -> LanguageModel:
    """A causal language model; learned positions and "cosine" are limited to `max_length`, other parts to no length.

    "rope" is rotary (RoFormer's causal form); its scalings extend to `length_scale` times `max_length`, the training
    length."""
    sizes = ComposeSizes(dim, dim // heads, heads, kv_heads or heads, max_length, length_scale)
    make_position = POSITIONS[position](sizes)
    first_position = make_position()
    in_attention = bool(first_position.required_seams() - {"embed"})

    def make_kernel() -> Kernel:
        base_kernel = KERNELS[kernel](sizes)
        is_dynamic = position == "rope-dynamic"
        return (
            DynamicRotaryKernel(base_kernel, sizes.head_dim, DynamicNTKRotaryScaling(length_scale, max_length))
            if is_dynamic
            else base_kernel
        )

    def layer(number: int) -> dict[str, Layer]:
        return {
            "attention": Attention(
                dim, heads, make_kernel(), kv_heads=kv_heads, position=make_position() if in_attention else None
            ),
            "ff": chunked(FEEDFORWARDS[feedforward](dim, ff_dim), ff_chunk),
        }

    embed = TokenEmbedding(
        vocab, dim, position=None if in_attention else first_position, scale=dim**0.5, dropout=dropout
    )
    make_norm = partial(NORMS[norm_kind], dim)
    body = stack(depth, layer, order=norm_order, norm=make_norm, dropout=dropout, streams=residual_streams)
    return LanguageModel(embed, body, ClassHead(dim, vocab, tied=embed.token))


def _fourier_features(sizes: ComposeSizes) -> RandomFourierFeatures:
    return RandomFourierFeatures(sizes.head_dim, FEATURES * sizes.head_dim, heads=sizes.kv_heads, redraw=1)


def _transformer_xl_position(sizes: ComposeSizes) -> Callable[[], Position]:
    """Transformer-XL's positions with one pair of biases for all layers, as in the paper."""
    biases = TransformerXLBiases(sizes.heads, sizes.head_dim)
    return lambda: TransformerXLPosition(sizes.dim, sizes.heads, width=sizes.head_dim, biases=biases)


def _shared_position(position: Position) -> Callable[[], Position]:
    """A maker that returns the same module for all layers, so that they share its tables."""
    return lambda: position
