"""Attention kernels by name: for causal language models, and for each of the three attentions of an encoder-decoder."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, NamedTuple

from manyformer.base.errors import UserError
from manyformer.nn.attention.attention import Attention
from manyformer.nn.attention.collaborative_attention import CollaborativeAttention
from manyformer.nn.attention.kv_cache import CrossAttentionSource, KVSource
from manyformer.nn.clustered.lsh_kernel import LSHKernel
from manyformer.nn.core import Layer
from manyformer.nn.kernels.kernel import Kernel
from manyformer.nn.kernels.pairwise_kernel import (
    AdditiveScore,
    BilinearScore,
    CosineScore,
    DotProductScore,
    EpanechnikovScore,
    GaussianScore,
    LaplaceScore,
    PairScore,
    PairwiseKernel,
    ReluMeanWeights,
    ReluWeights,
    SigmoidWeights,
    SoftmaxWeights,
    SoftpickWeights,
    WeightFunction,
)
from manyformer.nn.linear import (
    CosineReweightingFeatures,
    DPFPFeatures,
    EluPlusOneFeatures,
    FavorPlusFeatures,
    GeneralizedFavorFeatures,
    HedgehogFeatures,
    RandomFourierFeatures,
    T2RFeatures,
    TaylorFeatures,
)
from manyformer.nn.linear.linear_kernel import LinearKernel
from manyformer.nn.linear.lolcats_kernel import LolcatsKernel
from manyformer.nn.linear.memory_rules import DeltaRule, GatedRule
from manyformer.nn.low_rank.linformer_kernel import LearnedLengthProjection, LinformerKernel
from manyformer.nn.masks import (
    AllKeys,
    Causal,
    FirstTokens,
    Mask,
    VisibleToAll,
    Window,
    fixed_pattern,
    strided_pattern,
    union,
)
from manyformer.nn.softmax.softmax_kernel import SoftmaxKernel
from manyformer.nn.sparse.moba_kernel import MoBAKernel
from manyformer.recipes.bigbird import causal_pattern
from manyformer.recipes.collaborative import default_shared_dim
from manyformer.recipes.parts.keywords import PositiveSize
from manyformer.recipes.rfa import FLOOR as RFA_FLOOR
from manyformer.recipes.synthesizer import SCORE_KINDS, synthesized_attention

WINDOW = 128
"""Positions in a window; blocks, strides and chunks of the other patterns are a quarter of it."""

BUCKETS = 16
"""Buckets of each hash round."""


class AttentionSizes(NamedTuple):
    """The sizes that positions and kernels are built from.

    `length_scale` is a factor on the length of positions, `sinks` the number of first tokens that all windows contain.
    """

    dim: int
    heads: int
    kv_heads: int
    max_length: int
    length_scale: float = 1.0
    window: int = WINDOW
    sinks: int = 0

    @property
    def head_dim(self) -> int:
        """The width of a head."""
        return self.dim // self.heads

    @property
    def features(self) -> int:
        """The number of random features of a head: four for each channel."""
        return 4 * self.head_dim

    @property
    def block(self) -> int:
        """The number of positions in a block, a stride or a chunk."""
        return max(1, self.window // 4)


KernelMaker = Callable[[AttentionSizes], Kernel]


def _fourier_features(sizes: AttentionSizes) -> RandomFourierFeatures:
    return RandomFourierFeatures(sizes.head_dim, sizes.features, heads=sizes.kv_heads, redraw=1)


def _t2r_kernel(sizes: AttentionSizes, mask: Mask) -> LinearKernel:
    return LinearKernel(T2RFeatures(sizes.head_dim, sizes.head_dim, heads=sizes.kv_heads), mask)


def _hedgehog_kernel(sizes: AttentionSizes, mask: Mask) -> LinearKernel:
    # features are learned, so queries and keys have their own, for as many heads as there are of each
    features, key_features = (HedgehogFeatures(sizes.head_dim, heads=n) for n in (sizes.heads, sizes.kv_heads))
    return LinearKernel(features, mask, key_features=key_features)


def _linformer_kernel(sizes: AttentionSizes) -> LinformerKernel:
    """One projection to a quarter of the length for the keys and values of all heads (section 4, "key-value")."""
    return LinformerKernel(LearnedLengthProjection(sizes.max_length, max(1, sizes.max_length // 4)))


def _dot_product(sizes: AttentionSizes) -> DotProductScore:
    return DotProductScore()


PAIRWISE: dict[str, tuple[Callable[[AttentionSizes], PairScore], Callable[[], WeightFunction]]] = {
    "relu": (_dot_product, ReluWeights),
    "relu-squared": (_dot_product, partial(ReluWeights, power=2)),
    "relu-mean": (_dot_product, ReluMeanWeights),
    "softpick": (_dot_product, SoftpickWeights),
    "sigmoid": (_dot_product, SigmoidWeights),
    "cosine-similarity": (lambda s: CosineScore(), SoftmaxWeights),
    "bilinear": (lambda s: BilinearScore(s.head_dim, heads=s.heads), SoftmaxWeights),
    "additive": (lambda s: AdditiveScore(s.head_dim, s.head_dim), SoftmaxWeights),
    # queries and keys begin with variance 1, so at a distance of about sqrt(2 e)
    "gaussian": (lambda s: GaussianScore(s.head_dim**0.25), SoftmaxWeights),
    "laplace": (lambda s: LaplaceScore(1.0), SoftmaxWeights),
    "epanechnikov": (lambda s: EpanechnikovScore(2 * s.head_dim**0.5), ReluWeights),
}
"""Scores of pairs and what makes weights of them: attention that is quadratic whatever the score."""


def _pairwise_kernel(name: str, sizes: AttentionSizes, mask: Mask) -> PairwiseKernel:
    make_score, make_weights = PAIRWISE[name]
    return PairwiseKernel(make_score(sizes), make_weights(), mask)


MASKED_KERNELS: dict[str, Callable[[AttentionSizes, Mask], Kernel]] = {
    "softmax": lambda s, mask: SoftmaxKernel(mask),
    "linear": lambda s, mask: LinearKernel(EluPlusOneFeatures(), mask),
    "cosine": lambda s, mask: LinearKernel(CosineReweightingFeatures(s.max_length), mask),
    "taylor": lambda s, mask: LinearKernel(TaylorFeatures(), mask),
    "favor": lambda s, mask: LinearKernel(FavorPlusFeatures(s.head_dim, s.features, redraw=1000), mask),
    "favor-relu": lambda s, mask: LinearKernel(GeneralizedFavorFeatures(s.head_dim, s.features, redraw=1000), mask),
    "rfa": lambda s, mask: LinearKernel(_fourier_features(s), mask, floor=RFA_FLOOR),
    "t2r": _t2r_kernel,
    "hedgehog": _hedgehog_kernel,
    **{name: partial(_pairwise_kernel, name) for name in PAIRWISE},
}
"""Kernels that attend to earlier tokens, to all tokens, and to another sequence alike."""


def causal_window(size: int, sinks: int) -> Mask:
    """The last `size` tokens, and the first `sinks` of the document, which keep attention stable in long texts (Xiao et
    al. 2024, Efficient Streaming Language Models with Attention Sinks, arXiv:2309.17453, section 3.2)."""
    if sinks:
        return Causal() & (Window(size) | VisibleToAll(FirstTokens(sinks)))
    return Window(size)


def causal_kernel(name: str, sizes: AttentionSizes) -> Kernel:
    """The kernel of a causal language model. Raises UserError for sinks of a kernel that is no window."""
    if sizes.sinks and name != "window":
        raise UserError(f"sinks ({sizes.sinks}) belong to windows: set kernel=window, not {name}")
    return KERNELS[name](sizes)


def _with_mask(mask: Mask) -> dict[str, KernelMaker]:
    return {name: partial(_make_masked, name, mask) for name in MASKED_KERNELS}


def _make_masked(name: str, mask: Mask, sizes: AttentionSizes) -> Kernel:
    return MASKED_KERNELS[name](sizes, mask)


KERNELS: dict[str, KernelMaker] = {
    **_with_mask(Causal()),
    "window": lambda s: SoftmaxKernel(causal_window(s.window, s.sinks)),
    # the two sets of the Sparse Transformer in one head (section 4.3, "merged")
    "strided": lambda s: SoftmaxKernel(union(strided_pattern(s.block))),
    "fixed": lambda s: SoftmaxKernel(union(fixed_pattern(s.block, max(1, s.block // 4)))),
    "random-blocks": lambda s: SoftmaxKernel(causal_pattern(s.block, 2, -(-s.max_length // s.block), 0)),
    "moba": lambda s: MoBAKernel(s.block, 3),
    "delta": lambda s: LinearKernel(DPFPFeatures(), Causal(), rule=DeltaRule()),
    "rfa-gate": lambda s: LinearKernel(_fourier_features(s), Causal(), rule=GatedRule(), floor=RFA_FLOOR),
    # the strict form: a language model must not see which chunk later tokens fall into
    "lsh": lambda s: LSHKernel(num_buckets=BUCKETS, chunk_length=s.block, num_hashes=4),
    "lolcats": lambda s: LolcatsKernel(s.head_dim, heads=s.heads, kv_heads=s.kv_heads, window=s.window),
}
"""Kernels of causal self-attention. A plug-in may add names to this table and to the next two."""

ENCODER_KERNELS: dict[str, KernelMaker] = {
    **_with_mask(AllKeys()),
    # as many tokens as the causal window, half on each side
    "window": lambda s: SoftmaxKernel(Window(s.window // 2 + 1, lookahead=s.window // 2)),
    "linformer": _linformer_kernel,
    "lsh": lambda s: LSHKernel(
        num_buckets=BUCKETS, chunk_length=s.block, num_hashes=4, variant="published", chunks_after=1
    ),
}
"""Kernels of self-attention to both sides; a window is half before a token, half after it."""

CROSS_KERNELS: dict[str, KernelMaker] = {**_with_mask(AllKeys()), "linformer": _linformer_kernel}
"""Kernels of attention to another sequence, which those without pairs of tokens sum, or project, once."""

MaskedLayer = Callable[[AttentionSizes, Mask, KVSource | None], Layer]


def _collaborative_layer(sizes: AttentionSizes, mask: Mask, source: KVSource | None) -> Layer:
    shared = default_shared_dim(sizes.dim, None)
    return CollaborativeAttention(sizes.dim, sizes.heads, mask, shared=shared, source=source)


def _synthesizer_layer(score_kind: str, sizes: AttentionSizes, mask: Mask, source: KVSource | None) -> Layer:
    assert source is None
    return synthesized_attention(score_kind, sizes.dim, sizes.heads, sizes.max_length, mask)


SYNTHESIZERS = [f"synthesizer-{kind}" for kind in SCORE_KINDS]

ATTENTION_LAYERS: dict[str, MaskedLayer] = {
    "collaborative": _collaborative_layer,
    **{name: partial(_synthesizer_layer, name.removeprefix("synthesizer-")) for name in SYNTHESIZERS},
}
"""Kinds of attention with projections of their own."""

_PAST_ONLY = "its pattern is one of earlier tokens, for decoders"
_TOKEN_BY_TOKEN = "its memory is updated token by token, in the order of generation"
_ONE_SEQUENCE = "its pattern compares positions within one sequence, and source and target have different ones"
_PAST_PATTERNS = ("strided", "fixed", "random-blocks", "moba")
_RECURRENT = ("delta", "rfa-gate", "lolcats")


class AttentionRole(NamedTuple):
    """One of the three attentions of an encoder-decoder, with the kernels that it can have.

    `keyword` of a recipe selects the kernel, `mask` and `make_source` are those of layers that are no kernels, and
    `refusals` says why it cannot have a kernel."""

    keyword: str
    kernels: Mapping[str, KernelMaker]
    mask: Mask
    refusals: Mapping[str, str]
    make_source: Callable[[], KVSource | None] = lambda: None


ENCODER = AttentionRole(
    "encoder_kernel",
    ENCODER_KERNELS,
    AllKeys(),
    {**dict.fromkeys(_PAST_PATTERNS, _PAST_ONLY), **dict.fromkeys(_RECURRENT, _TOKEN_BY_TOKEN)},
)
DECODER = AttentionRole(
    "decoder_kernel",
    KERNELS,
    Causal(),
    {"linformer": "each projected key mixes all tokens, so that later ones cannot be masked"},
)
CROSS = AttentionRole(
    "cross_kernel",
    CROSS_KERNELS,
    AllKeys(),
    {
        **dict.fromkeys(("window", *_PAST_PATTERNS), _ONE_SEQUENCE),
        **dict.fromkeys(_RECURRENT, _TOKEN_BY_TOKEN),
        "lsh": "its queries are the keys of the same tokens (Kitaev et al. 2020 translate with softmax here)",
        **dict.fromkeys(SYNTHESIZERS, "its scores do not compare two sequences (Tay et al. 2021 use softmax here)"),
    },
    CrossAttentionSource,
)


def make_attention(role: AttentionRole, kernel: str, sizes: AttentionSizes) -> Layer:
    """The attention of an encoder-decoder in this role. Raises UserError, with the reason, if it cannot be."""
    if kernel in role.kernels:
        return Attention(sizes.dim, sizes.heads, role.kernels[kernel](sizes), source=role.make_source())
    # layers with projections of their own are no kernels, and get mask and source themselves
    if kernel in ATTENTION_LAYERS and kernel not in role.refusals:
        return ATTENTION_LAYERS[kernel](sizes, role.mask, role.make_source())
    reason = role.refusals.get(kernel, f"known here: {', '.join(role.kernels)}")
    raise UserError(f"{role.keyword} cannot be {kernel}: {reason}; set {role.keyword} to another, such as softmax")


KernelName = Annotated[str, KERNELS, "attention kernel"]
AttentionName = Annotated[str, KERNELS, ENCODER_KERNELS, ATTENTION_LAYERS, "kind of attention where no other is given"]
EncoderKernel = Annotated[
    str | None, ENCODER_KERNELS, ATTENTION_LAYERS, KERNELS, "self-attention of the encoder; null means kernel"
]
DecoderKernel = Annotated[
    str | None, KERNELS, ATTENTION_LAYERS, ENCODER_KERNELS, "self-attention of the decoder; null means kernel"
]
CrossKernel = Annotated[
    str | None, CROSS_KERNELS, ATTENTION_LAYERS, KERNELS, "attention of the decoder to the encoder; null means kernel"
]
SinkCount = Annotated[
    PositiveSize | None, "number of first tokens that stay visible beyond the window, such as 4 (attention sinks)"
]
KernelWindow = Annotated[
    PositiveSize, "number of positions in the window of kernels with a pattern; blocks and chunks are a quarter of it"
]
