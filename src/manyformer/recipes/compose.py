"""A language model and an image classifier composed of parts chosen by name, for ablations."""

from collections.abc import Callable
from functools import partial
from typing import Annotated, Literal, NamedTuple, Unpack

from torch import nn

from manyformer.base.errors import UserError
from manyformer.models import ImageClassifier, LanguageModel, TokenEmbedding
from manyformer.models.image_classifier import count_patches
from manyformer.models.tasks.language_modelling import LANGUAGE_MODELLING
from manyformer.models.tasks.media_labels import IMAGE_CLASSIFICATION
from manyformer.nn.attention.attention import Attention
from manyformer.nn.core import Layer
from manyformer.nn.feed_forward.feedforward import FeedForward, GatedFeedForward, SquaredReLU, chunked
from manyformer.nn.kernels.kernel import Kernel
from manyformer.nn.linear import EluPlusOneFeatures
from manyformer.nn.linear.linear_kernel import LinearKernel
from manyformer.nn.low_rank.linformer_kernel import LearnedLengthProjection, LinformerKernel
from manyformer.nn.positions import (
    AlibiPosition,
    ComposedPosition,
    ContextualPosition,
    DistanceAwarePosition,
    DynamicNTKRotaryScaling,
    FirePosition,
    HeadNorm,
    KerplePosition,
    LearnedPosition,
    LinearRotaryScaling,
    Llama3RotaryScaling,
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
from manyformer.nn.residual import make_join
from manyformer.nn.runtime.length_norms import RMSNorm
from manyformer.nn.softmax.dynamic_rotary import DynamicRotaryKernel
from manyformer.nn.softmax.forgetting_kernel import ForgettingKernel
from manyformer.nn.softmax.path_kernel import PaTHKernel
from manyformer.nn.softmax.softmax_kernel import SoftmaxKernel
from manyformer.nn.token_mixing import FourierMixer, PairTable, TokenMLP
from manyformer.nn.token_mixing.synthesizer_attention import DenseScores, FixedScores, SynthesizerAttention
from manyformer.recipes.gmlp import position_weight_std, spatial_gate
from manyformer.recipes.parts.attention_kernels import KERNELS, AttentionSizes, KernelName
from manyformer.recipes.parts.baselines import LoopCount, NormOrder, language_model, makers_of_pattern
from manyformer.recipes.parts.keywords import (
    FeedForwardChunk,
    ImageChannels,
    ImageHeight,
    ImageWidth,
    PatchSide,
    PositiveSize,
    ResidualGate,
)
from manyformer.recipes.parts.recurrent_layers import RecurrentSizes, gated_delta_attention
from manyformer.recipes.parts.registry import recipe
from manyformer.recipes.parts.residual_streams import BlockLayers, ResidualStreams, StreamCount, residual_streams_of
from manyformer.recipes.parts.speedrun_parts import LogitCap, SpeedrunParts, add_speedrun_parts
from manyformer.recipes.vit import TINY_IMAGES, ImagePooling, PatchPositionKind, image_classifier

FeedForwardName = Annotated[
    Literal["relu", "gelu", "swiglu", "geglu", "relu2"], "kind of feed-forward layer and activation"
]
LayerPattern = Annotated[
    str,
    "kinds of layers, repeated: K has the kernel, F is softmax over all tokens, N is F without positions, D has the "
    "gated delta rule without positions",
]
NormName = Annotated[Literal["layer", "rms"], "LayerNorm or RMSNorm"]


def _transformer_xl_position(sizes: AttentionSizes) -> Callable[[], Position]:
    """Transformer-XL's positions with one pair of biases for all layers, as in the paper."""
    biases = TransformerXLBiases(sizes.heads, sizes.head_dim)
    return lambda: TransformerXLPosition(sizes.dim, sizes.heads, width=sizes.head_dim, biases=biases)


def _shared_position(position: Position) -> Callable[[], Position]:
    """A maker that returns the same module for all layers, so that they share its tables."""
    return lambda: position


POSITIONS: dict[str, Callable[[AttentionSizes], Callable[[], Position]]] = {
    "sinusoid": lambda s: lambda: SinusoidalPosition(s.dim),
    "learned": lambda s: lambda: LearnedPosition(s.dim, s.max_length),
    "none": lambda s: NoPosition,
    "rope": lambda s: _shared_position(RotaryPosition(s.head_dim)),
    "rope-linear": lambda s: _shared_position(RotaryPosition(s.head_dim, scaling=LinearRotaryScaling(s.length_scale))),
    "rope-ntk": lambda s: _shared_position(RotaryPosition(s.head_dim, scaling=NTKRotaryScaling(s.length_scale))),
    "rope-yarn": lambda s: _shared_position(
        RotaryPosition(s.head_dim, scaling=YaRNRotaryScaling(s.length_scale, s.max_length))
    ),
    "rope-llama3": lambda s: _shared_position(
        RotaryPosition(s.head_dim, scaling=Llama3RotaryScaling(s.length_scale, s.max_length))
    ),
    "xl": _transformer_xl_position,
    "da": lambda s: lambda: DistanceAwarePosition(s.heads),
    "alibi": lambda s: _shared_position(AlibiPosition(s.heads)),
    # the paper shares one table among all layers
    "t5": lambda s: _shared_position(T5BiasPosition(s.heads, direction="past")),
    "kerple": lambda s: lambda: KerplePosition(s.heads),
    "kerple-power": lambda s: lambda: KerplePosition(s.heads, "power"),
    "fire": lambda s: lambda: FirePosition(s.heads),
    "cope": lambda s: lambda: ContextualPosition(s.head_dim),
    "shaw": lambda s: lambda: ShawPosition(s.head_dim, direction="past"),
    # their gates and reflections are projected by the kernel
    "fox": lambda s: NoPosition,
    "path": lambda s: NoPosition,
    # its angles depend on the query, so the kernel rotates the keys
    "rope-dynamic": lambda s: NoPosition,
}
"""From sizes to a function that makes the position of the embedding, or of each layer's attention in turn.

A plug-in may add names, here and to `KERNELS`."""

SOFTMAX_KERNELS: dict[str, Callable[[AttentionSizes], Kernel]] = {
    "fox": lambda s: ForgettingKernel(s.dim, s.kv_heads),
    "path": lambda s: PaTHKernel(s.dim, s.kv_heads, s.head_dim),
}
"""The kernels of positions that are a form of softmax attention."""

KERNEL_POSITIONS = {*SOFTMAX_KERNELS, "rope-dynamic"}
"""The positions that the kernel of a layer computes itself."""

FEEDFORWARDS: dict[FeedForwardName, Callable[[int, int | None], Layer]] = {
    "relu": FeedForward,
    "gelu": lambda dim, hidden: FeedForward(dim, hidden, activation=nn.GELU()),
    "swiglu": GatedFeedForward,
    "relu2": lambda dim, hidden: FeedForward(dim, hidden, activation=SquaredReLU()),
    "geglu": lambda dim, hidden: GatedFeedForward(dim, hidden, activation=nn.GELU()),
}

PositionName = Annotated[str, POSITIONS, "kind of position encoding"]

NORMS: dict[NormName, Callable[[int], nn.Module]] = {"layer": nn.LayerNorm, "rms": RMSNorm}


@recipe(
    "Any mixture of parts",
    paper="none: a testbed for comparing parts",
    summary="Every part is chosen by name, so that one can be changed and the others kept.",
    task=LANGUAGE_MODELLING,
    family="softmax",
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
    gate: ResidualGate = "residual",
    loops: LoopCount = 1,
    pattern: LayerPattern = "K",
    *,
    qk_norm: Annotated[bool, "queries and keys are normalized in each head, before positions"] = False,
    logit_cap: LogitCap = None,
    stream_count: StreamCount = None,
    block_layers: BlockLayers = None,
    **parts: Unpack[SpeedrunParts],
) -> LanguageModel:
    """A causal language model; learned positions and "cosine" are limited to `max_length`, other parts to no length.

    "rope" is rotary (RoFormer's causal form); its scalings extend to `length_scale` times `max_length`, the training
    length. Gates begin with the bias 2 (Parisotto et al. 2020). A `pattern` such as DDDF or KKKF makes a hybrid of
    layers; the D of each is the layer of `gated-deltanet`. `parts` are those of `baseline-2026`. Raises UserError for
    parts that exclude each other."""
    if gate != "residual" and residual_streams != "plain":
        raise UserError(f"gate '{gate}' needs residual_streams=plain: to other streams branches are added")
    if position in SOFTMAX_KERNELS and kernel != "softmax":
        raise UserError(f"kernel {kernel} does not support position {position}, which changes the scores of softmax")
    sizes = AttentionSizes(dim, heads, kv_heads or heads, max_length, length_scale)
    make_position = POSITIONS[position](sizes)
    # one is made to ask it where it acts; it is used where positions are added to the embedding
    first_position = make_position()
    in_attention = bool(first_position.required_seams() - {"embed"})
    if "N" in pattern and not in_attention and position not in KERNEL_POSITIONS:
        raise UserError(f"pattern ('{pattern}') has N, but position {position} is none of single layers, to leave out")
    if "K" not in pattern and kernel != "softmax":
        raise UserError(f"kernel {kernel} is that of layers K, of which pattern ('{pattern}') has none")

    def make_attention(kernel_name: str) -> Attention:
        base_kernel = KERNELS[kernel_name](sizes)
        if position == "rope-dynamic":
            scaling = DynamicNTKRotaryScaling(length_scale, max_length)
            base_kernel = DynamicRotaryKernel(base_kernel, sizes.head_dim, scaling)
        if position in SOFTMAX_KERNELS:
            base_kernel = SOFTMAX_KERNELS[position](sizes)
        layer_position = make_position() if in_attention else None
        if qk_norm:
            norms = HeadNorm(sizes.head_dim)
            layer_position = norms if layer_position is None else ComposedPosition(norms, layer_position)
        return Attention(dim, heads, base_kernel, kv_heads=kv_heads, position=layer_position)

    attention_makers: dict[str, Callable[[], Attention]] = {
        "K": partial(make_attention, kernel),
        "F": partial(make_attention, "softmax"),
        # as in models that leave rotations out in full layers (NoPE)
        "N": lambda: Attention(
            dim,
            heads,
            KERNELS["softmax"](sizes),
            kv_heads=kv_heads,
            position=HeadNorm(sizes.head_dim) if qk_norm else None,
        ),
        "D": lambda: gated_delta_attention(RecurrentSizes.of(dim, heads, None)),
    }

    def layer(number: int, make: Callable[[], Attention]) -> dict[str, Layer]:
        return {"attention": make(), "ff": chunked(FEEDFORWARDS[feedforward](dim, ff_dim), ff_chunk)}

    added_position = None if in_attention else first_position
    embed = TokenEmbedding(vocab, dim, position=added_position, scale=dim**0.5, dropout=dropout)
    norm = partial(NORMS[norm_kind], dim)
    join = partial(make_join, gate, dim, dropout=dropout)
    makers = makers_of_pattern(pattern, {kind: partial(layer, make=make) for kind, make in attention_makers.items()})
    model = language_model(
        embed,
        depth,
        makers,
        dropout=dropout,
        norm_order=norm_order,
        norm=norm,
        streams=residual_streams_of(residual_streams, dim, count=stream_count, block_layers=block_layers),
        loops=loops,
        join=join,
        logit_cap=logit_cap,
        scaled_init=False,
    )
    return add_speedrun_parts(model, **parts)


MixerName = Annotated[
    Literal["softmax", "linear", "linformer", "fourier", "tokens", "gate", "dense", "random"],
    "the layer that mixes patches: a kind of attention, or a layer without attention",
]


class ImageComposeSizes(NamedTuple):
    """The sizes that mixers are built from."""

    dim: int
    heads: int
    tokens: int
    projected_length: int


MIXERS: dict[MixerName, Callable[[ImageComposeSizes], Callable[[], Layer]]] = {
    "softmax": lambda s: lambda: Attention(s.dim, s.heads, SoftmaxKernel()),
    "linear": lambda s: lambda: Attention(s.dim, s.heads, LinearKernel(EluPlusOneFeatures())),
    # the paper's best sharing: one projection for all layers
    "linformer": lambda s: _linformer_mixer(s, LearnedLengthProjection(s.tokens, s.projected_length)),
    # its output is added to the residual stream without a norm
    "fourier": lambda s: lambda: FourierMixer(norm="ortho"),
    "tokens": lambda s: lambda: TokenMLP(s.tokens, s.dim // 2),
    "gate": lambda s: lambda: spatial_gate(s.dim, 2 * s.dim, PairTable(s.tokens, std=position_weight_std(s.tokens))),
    "dense": lambda s: lambda: SynthesizerAttention(s.dim, [DenseScores(s.dim, s.heads, s.tokens)]),
    "random": lambda s: (
        lambda: SynthesizerAttention(s.dim, [FixedScores(PairTable(s.tokens, heads=s.heads, std=s.tokens**-0.5))])
    ),
}
"""From sizes to a function that makes the mixer of each layer in turn."""


@recipe(
    "Compose for images",
    paper="a testbed for comparisons, after Dosovitskiy et al. 2021, arXiv:2010.11929",
    summary="Image classifiers that differ only in the layer that mixes their patches.",
    task=IMAGE_CLASSIFICATION,
    family="softmax",
    cost="that of its parts",
    tiny_keywords={**TINY_IMAGES, "projected_length": 4},
)
def compose_images(
    classes: int = 10,
    height: ImageHeight = 28,
    width: ImageWidth = 28,
    channels: ImageChannels = 1,
    patch: PatchSide = 4,
    dim: int = 128,
    depth: int = 4,
    heads: int = 4,
    ff_dim: int | None = None,
    mixer: MixerName = "softmax",
    projected_length: Annotated[
        PositiveSize, "number of projected keys that replace all keys, where mixer is linformer"
    ] = 16,
    positions: PatchPositionKind = "learned",
    pool: ImagePooling = "mean",
    dropout: float = 0.0,
) -> ImageClassifier:
    """`vit` with another mixer in place of attention, and mean pooling by default.

    "fourier" is FNet's, "tokens" MLP-Mixer's, "gate" gMLP's, "dense" and "random" are Synthesizers; "linformer" has
    `projected_length`. All have the same feed-forward layers, which gMLP itself does not have."""
    shape = (height, width, channels)
    # mixers with weights for positions count the class token too
    tokens = count_patches(shape, patch) + (1 if pool == "first" else 0)
    sizes = ImageComposeSizes(dim, heads, tokens, projected_length)
    make_mixer = MIXERS[mixer](sizes)

    def layer(number: int) -> dict[str, Layer]:
        return {"mixer": make_mixer(), "ff": FeedForward(dim, ff_dim, activation=nn.GELU())}

    return image_classifier(classes, shape, patch, dim, depth, layer, positions=positions, pool=pool, dropout=dropout)


def _linformer_mixer(sizes: ImageComposeSizes, projection: LearnedLengthProjection) -> Callable[[], Layer]:
    return lambda: Attention(sizes.dim, sizes.heads, LinformerKernel(projection))
