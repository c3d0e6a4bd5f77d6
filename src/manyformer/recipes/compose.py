"""A language model and an image classifier composed of parts chosen by name, for ablations."""

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple, Unpack

from torch import nn

from manyformer.base.errors import UserError
from manyformer.models import ImageClassifier, LanguageModel, TokenEmbedding
from manyformer.models.image_classifier import count_patches
from manyformer.models.tasks.language_modelling import LANGUAGE_MODELLING
from manyformer.models.tasks.media_labels import IMAGE_CLASSIFICATION
from manyformer.nn.attention.attention import Attention
from manyformer.nn.attention.shared_keys import SharedKeys, SharedKeysAttention, share_keys
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
from manyformer.recipes.parts.ahead_layers import AheadKind, AheadTokens, AheadWeight, add_ahead_layers
from manyformer.recipes.parts.attention_kernels import KERNELS, WINDOW, AttentionSizes, KernelName
from manyformer.recipes.parts.baselines import LoopCount, NormOrder, complete_layer, language_model
from manyformer.recipes.parts.keywords import (
    FeedForwardChunk,
    ImageChannels,
    ImageHeight,
    ImageWidth,
    PatchSide,
    PositiveSize,
    ResidualGate,
)
from manyformer.recipes.parts.layer_patterns import EXPERTS, FEED_FORWARD, MixerMaker, layers_of_pattern, parse_pattern
from manyformer.recipes.parts.mixer_letters import (
    MIXER_LETTERS,
    MixerKeywords,
    MixerSizes,
    check_mixer_keywords,
    make_experts,
)
from manyformer.recipes.parts.registry import recipe
from manyformer.recipes.parts.residual_streams import BlockLayers, ResidualStreams, StreamCount, residual_streams_of
from manyformer.recipes.parts.speedrun_parts import LogitCap, SpeedrunParts, add_speedrun_parts
from manyformer.recipes.vit import TINY_IMAGES, ImagePooling, PatchPositionKind, image_classifier

FeedForwardName = Annotated[
    Literal["relu", "gelu", "swiglu", "geglu", "relu2"], "kind of feed-forward layer and activation"
]
LayerPattern = Annotated[
    str,
    "kinds of layers, repeated: K has the kernel, F is softmax over all tokens, N is F without positions, W is F in a "
    "window, Y reads the keys of the lowest Y, and the mixers are D (gated delta rule), d (delta rule), A (KDA), P "
    "(DeltaProduct), X (Gated DeltaNet-2), V (Comba), M (Mamba-2), T (Mamba-3), m (Mamba), R (retention), G (GLA), H "
    "(HGRN2), L (lightning), S (mLSTM), l (LSTM), C (gated convolution); (MF) are side by side, M. has no feed-forward "
    "branch, - has nothing else, E has experts alone",
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

SOFTMAX_LETTERS = {
    "K": "the kernel",
    "F": "softmax over all tokens",
    "N": "F without positions",
    "W": "F in a window",
    "Y": "the keys of the lowest Y",
}
"""The letters of a pattern whose layers depend on the kernel and the positions of `compose`, and their meanings."""


class ComposeParts(SpeedrunParts, MixerKeywords, total=False):
    """The keywords that `compose` shares with `baseline-2026`, and those of the mixers of its pattern."""


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
    shared_layers: Annotated[
        str, "letters of pattern whose layers are one layer, with the same weights in all of its places"
    ] = "",
    *,
    qk_norm: Annotated[bool, "queries and keys are normalized in each head, before positions"] = False,
    logit_cap: LogitCap = None,
    stream_count: StreamCount = None,
    block_layers: BlockLayers = None,
    ahead: AheadKind = "none",
    ahead_tokens: AheadTokens = None,
    ahead_weight: AheadWeight = None,
    **parts: Unpack[ComposeParts],
) -> LanguageModel:
    """A causal language model; learned positions and "cosine" are limited to `max_length`, other parts to no length.

    "rope" is rotary (RoFormer's causal form); its scalings extend to `length_scale` times `max_length`, the training
    length. Gates begin with the bias 2 (Parisotto et al. 2020). A `pattern` such as DDDF, M.M.F-, (MF) or WWYY makes a
    hybrid of layers; each mixer is the layer of its own recipe, of which it has the keywords, and experts are those of
    `mixtral`. Layers Y have queries alone: keys and values are those of the lowest Y, cached once (Sun et al. 2024,
    arXiv:2405.05254). `parts` are those of `baseline-2026`. Raises UserError for parts that exclude each other."""
    if gate != "residual" and residual_streams != "plain":
        raise UserError(f"gate '{gate}' needs residual_streams=plain: to other streams branches are added")
    if position in SOFTMAX_KERNELS and kernel != "softmax":
        raise UserError(f"kernel {kernel} does not support position {position}, which changes the scores of softmax")
    sizes = AttentionSizes(dim, heads, kv_heads or heads, max_length, length_scale)
    make_position = POSITIONS[position](sizes)
    # one is made to ask it where it acts; it is used where positions are added to the embedding
    first_position = make_position()
    in_attention = bool(first_position.required_seams() - {"embed"})
    options = {name: value for name, value in parts.items() if name in MixerKeywords.__annotations__}
    # the types of two records in one are not told apart
    speedrun_parts: Any = {name: value for name, value in parts.items() if name not in options}
    mixer_sizes = MixerSizes(dim, depth, heads, options)
    meanings = {**SOFTMAX_LETTERS, **{letter: mixer.meaning for letter, mixer in MIXER_LETTERS.items()}}
    kinds = parse_pattern(pattern, meanings)
    used = {letter for kind in kinds for letter in kind.mixers + kind.then}
    if "N" in used and not in_attention and position not in KERNEL_POSITIONS:
        raise UserError(f"pattern ('{pattern}') has N, but position {position} is none of single layers, to leave out")
    if "K" not in used and kernel != "softmax":
        raise UserError(f"kernel {kernel} is that of layers K, of which pattern ('{pattern}') has none")
    _check_pattern(pattern, used, position, residual_streams, loops, has_parts=any(speedrun_parts.values()))
    if ahead in ("sequential", "parallel") and ("Y" in used or shared_layers):
        raise UserError(
            f"ahead ({ahead}) adds layers with weights and keys of their own: without Y in pattern ('{pattern}'), and "
            f"without shared_layers ('{shared_layers}')"
        )
    readers = {letter: mixer.keywords for letter, mixer in MIXER_LETTERS.items()}
    check_mixer_keywords(options, kinds, {"W": frozenset({"window"}), **readers})
    _check_shared(shared_layers, pattern, used, residual_streams)
    softmax = _SoftmaxLayers(sizes, position, make_position if in_attention else None, qk_norm=qk_norm)
    window_sizes = sizes._replace(window=mixer_sizes.option("window", WINDOW))
    # one for all layers Y, as the keys that it acts on are theirs together
    shared_position = softmax.layer_position() if "Y" in used else None
    mixers: dict[str, MixerMaker] = {
        "K": lambda number: softmax.attention(KERNELS[kernel](sizes)),
        "F": lambda number: softmax.attention(KERNELS["softmax"](sizes)),
        "N": lambda number: softmax.attention_without_positions(),
        "W": lambda number: softmax.attention(KERNELS["window"](window_sizes)),
        "Y": lambda number: softmax.shared_keys_attention(shared_position),
    }
    mixers |= {letter: MIXER_LETTERS[letter].maker(mixer_sizes) for letter in used & MIXER_LETTERS.keys()}
    feed_forwards: dict[str, Callable[[], Layer]] = {
        FEED_FORWARD: lambda: chunked(FEEDFORWARDS[feedforward](dim, ff_dim), ff_chunk),
        EXPERTS: partial(make_experts, mixer_sizes),
    }
    added_position = None if in_attention else first_position
    embed = TokenEmbedding(vocab, dim, position=added_position, scale=dim**0.5, dropout=dropout)
    norm = partial(NORMS[norm_kind], dim)
    join = partial(make_join, gate, dim, dropout=dropout)
    makers = layers_of_pattern(kinds, mixers, feed_forwards, shared_layers)
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
    lowest = next((number for number in range(depth) if "Y" in kinds[number % len(kinds)].mixers), None)
    if lowest is not None:
        keys = SharedKeys(dim, sizes.kv_heads, sizes.head_dim, norm=norm(), position=shared_position)
        model.body = share_keys(model.body, keys, str(lowest))
    return add_ahead_layers(
        add_speedrun_parts(model, **speedrun_parts),
        makers,
        partial(complete_layer, order=norm_order, norm=norm, dropout=dropout, join=join),
        norm,
        depth=depth,
        ahead=ahead,
        ahead_tokens=ahead_tokens,
        ahead_weight=ahead_weight,
    )


def _check_shared(shared_layers: str, pattern: str, used: set[str], streams: str) -> None:
    """Raise UserError for shared letters that the pattern does not have, and for streams that need single layers."""
    if missing := sorted(set(shared_layers) - used):
        raise UserError(f"shared_layers ('{shared_layers}') has {missing[0]}, which pattern ('{pattern}') has not")
    if shared_layers and streams != "plain":
        raise UserError(f"shared_layers ('{shared_layers}') need residual_streams=plain, not {streams}")


def _check_pattern(pattern: str, used: set[str], position: str, streams: str, loops: int, *, has_parts: bool) -> None:
    """Raise UserError for letters of a pattern that the other keywords exclude."""
    if "W" in used and position in SOFTMAX_KERNELS:
        raise UserError(f"pattern ('{pattern}') has W, a window, but position {position} has a kernel without one")
    if "Y" not in used:
        return
    conflict = f"pattern ('{pattern}') has Y, whose keys are projected once at its lowest place:"
    if position in KERNEL_POSITIONS:
        raise UserError(f"{conflict} position {position} is computed by the kernel of each layer")
    if streams != "plain":
        raise UserError(f"{conflict} it needs residual_streams=plain, not {streams}")
    if loops > 1:
        raise UserError(f"{conflict} loops ({loops}) would project them again")
    if has_parts:
        raise UserError(f"{conflict} parts of baseline-2026, such as canon, need layers with keys of their own")


class _SoftmaxLayers(NamedTuple):
    """Makes the attention of layers of the same sizes and positions; `make_position` is None where these are added."""

    sizes: AttentionSizes
    position: str
    make_position: Callable[[], Position] | None
    qk_norm: bool

    def layer_position(self) -> Position | None:
        """The position of a layer, after the norm of queries and keys."""
        position = None if self.make_position is None else self.make_position()
        if not self.qk_norm:
            return position
        norms = HeadNorm(self.sizes.head_dim)
        return norms if position is None else ComposedPosition(norms, position)

    def attention(self, kernel: Kernel) -> Attention:
        """Attention with a kernel, or with that of the position."""
        sizes = self.sizes
        if self.position == "rope-dynamic":
            scaling = DynamicNTKRotaryScaling(sizes.length_scale, sizes.max_length)
            kernel = DynamicRotaryKernel(kernel, sizes.head_dim, scaling)
        if self.position in SOFTMAX_KERNELS:
            kernel = SOFTMAX_KERNELS[self.position](sizes)
        return Attention(sizes.dim, sizes.heads, kernel, kv_heads=sizes.kv_heads, position=self.layer_position())

    def attention_without_positions(self) -> Attention:
        """Attention to all tokens, as in models that leave rotations out in full layers (NoPE)."""
        sizes = self.sizes
        norms = HeadNorm(sizes.head_dim) if self.qk_norm else None
        kernel = KERNELS["softmax"](sizes)
        return Attention(sizes.dim, sizes.heads, kernel, kv_heads=sizes.kv_heads, position=norms)

    def shared_keys_attention(self, position: Position | None) -> SharedKeysAttention:
        """Attention to keys that are projected for several layers, with the position that acts on these."""
        sizes = self.sizes
        kernel = KERNELS["softmax"](sizes)
        return SharedKeysAttention(
            sizes.dim, sizes.heads, kernel, kv_heads=sizes.kv_heads, head_dim=sizes.head_dim, position=position
        )


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
