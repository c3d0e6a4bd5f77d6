"""Llama, and the decoders that vary its parts: Mistral, Qwen, Gemma 2 and 3 and SmolLM."""

from collections.abc import Callable
from functools import partial
from typing import Annotated, Literal, Unpack

import torch
from annotated_types import Gt
from torch import nn

from manyformer.base.errors import UserError
from manyformer.models import LanguageModel
from manyformer.models.tasks.language_modelling import LANGUAGE_MODELLING
from manyformer.nn.attention.attention import Attention
from manyformer.nn.attention.kv_cache import SegmentMemorySource
from manyformer.nn.attention.output_stages import GatedNormStage
from manyformer.nn.core import Layer
from manyformer.nn.feed_forward.feedforward import GatedFeedForward
from manyformer.nn.kernels.kernel import Kernel
from manyformer.nn.masks import Causal
from manyformer.nn.positions import (
    ComposedPosition,
    HeadNorm,
    LinearRotaryScaling,
    Llama3RotaryScaling,
    LongRoPERotaryScaling,
    NoPosition,
    NTKRotaryScaling,
    Position,
    RotaryPosition,
    ScoreCap,
    YaRNRotaryScaling,
)
from manyformer.nn.positions.rotary import RotaryScaling
from manyformer.nn.runtime.head_selection import HeadProjection
from manyformer.nn.runtime.length_norms import RMSNorm
from manyformer.nn.softmax.softmax_kernel import SoftmaxKernel
from manyformer.recipes.parts.ahead_layers import AheadKind, AheadTokens, AheadWeight, add_ahead_layers
from manyformer.recipes.parts.attention_kernels import (
    WINDOW,
    AttentionSizes,
    KernelName,
    SinkCount,
    causal_kernel,
    causal_window,
)
from manyformer.recipes.parts.baselines import LoopCount, NormOrder, complete_layer, head_width, init_std, rms_decoder
from manyformer.recipes.parts.keywords import (
    CausalWindowOrNone,
    HeadDim,
    MemoryLengthOrNone,
    NormEps,
    PositiveSize,
    RopeBase,
    TiedOutput,
)
from manyformer.recipes.parts.registry import recipe
from manyformer.recipes.parts.residual_streams import BlockLayers, ResidualStreams, StreamCount, residual_streams_of
from manyformer.recipes.parts.speedrun_parts import SpeedrunParts, add_speedrun_parts

RopeScaling = Annotated[
    Literal["none", "linear", "ntk", "yarn", "llama3", "longrope"],
    "how rotary positions reach rope_factor times original_length tokens",
]
GATE_ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "silu": nn.SiLU,
    "gelu": nn.GELU,
    "gelu-tanh": partial(nn.GELU, "tanh"),
}
Cap = Annotated[float, Gt(0)]


@recipe(
    "Llama",
    paper="Touvron et al. 2023, LLaMA: Open and Efficient Foundation Language Models, arXiv:2302.13971",
    summary="Pre-norm with RMSNorm, SwiGLU, rotary positions and grouped heads: the decoder of most open models.",
    task=LANGUAGE_MODELLING,
    family="softmax",
    cost="O(l^2 d + l d^2) per layer, O(l w d + l d^2) with windows of w",
    tiny_keywords={"kv_heads": 1, "window": 5, "full_every": 2, "qk_norm": True},
)
def llama(
    vocab: int = 32000,
    dim: int = 512,
    depth: int = 8,
    heads: int = 8,
    kv_heads: int | None = None,
    head_dim: HeadDim = None,
    ff_dim: int | None = None,
    window: CausalWindowOrNone = None,
    full_every: Annotated[
        PositiveSize | None, "among layers of windows or of another kernel, every n-th has softmax over all tokens"
    ] = None,
    rope_base: RopeBase = 10_000.0,
    rope_scaling: RopeScaling = "none",
    rope_factor: Annotated[float, "factor by which rope_scaling extends original_length"] = 4.0,
    original_length: Annotated[PositiveSize, "length before rope_scaling, which all but linear and ntk need"] = 2048,
    rope_divisors: Annotated[
        str | None, "what longrope divides the frequency of each pair by, with commas; for longer texts, after a slash"
    ] = None,
    rope_length: Annotated[
        Literal["original", "extended"], "the set of rope_divisors: for texts of up to original_length, or longer ones"
    ] = "original",
    rotated_dim: Annotated[PositiveSize | None, "rotated channels of a head; null means all (Phi-4: 3/4)"] = None,
    unrotated_every: Annotated[PositiveSize | None, "every n-th layer has no rotary positions (SmolLM3: 4)"] = None,
    kernel: KernelName = "softmax",
    sinks: SinkCount = None,
    memory_length: MemoryLengthOrNone = None,
    loops: LoopCount = 1,
    *,
    qk_norm: Annotated[bool, "queries and keys are normalized in each head (Qwen3)"] = False,
    output_gate: Annotated[
        bool, "outputs of heads are multiplied by the sigmoid of a projection of the input (Qwen3-Next)"
    ] = False,
    biases: Annotated[Literal["none", "qkv", "all"], "projections of attention with a bias (Qwen2: qkv)"] = "none",
    ff_activation: Annotated[
        Literal["silu", "gelu", "gelu-tanh"], "activation of the gate of the feed-forward"
    ] = "silu",
    window_rope_base: Annotated[
        Annotated[float, Gt(0)] | None, "base of rotary positions in layers of windows, without rope_scaling (Gemma 3)"
    ] = None,
    norm_order: NormOrder = "pre",
    norm_eps: NormEps = 1e-6,
    tied: TiedOutput = False,
    scaled_embedding: Annotated[bool, "embeddings are multiplied by sqrt(dim) (Gemma)"] = False,
    score_scale: Annotated[float | None, "factor of scores; null means 1 / sqrt(head_dim)"] = None,
    score_cap: Annotated[Cap | None, "scores s become cap tanh(s / cap) (Gemma 2: 50)"] = None,
    logit_cap: Annotated[Cap | None, "logits z become cap tanh(z / cap) (Gemma 2: 30)"] = None,
    residual_streams: ResidualStreams = "plain",
    stream_count: StreamCount = None,
    block_layers: BlockLayers = None,
    dropout: float = 0.0,
    ahead: AheadKind = "none",
    ahead_tokens: AheadTokens = None,
    ahead_weight: AheadWeight = None,
    **parts: Unpack[SpeedrunParts],
) -> LanguageModel:
    """Llama by default, smaller than published: 7B has dim=4096, depth=32, heads=32, ff_dim=11008 (table 2).

    Section 2.2. Mistral has `window`; Gemma 2 has `window` with `full_every=2`, sandwich norms, caps, a tanh GELU gate
    and a scaled, tied embedding; Gemma 3 has norms of queries and keys for the caps, `full_every=6` and
    `window_rope_base`; Llama 3.1 has `rope_scaling="llama3"`; Qwen2 has biases, Qwen3 norms of queries and keys;
    `output_gate` is the gated attention of Qiu et al. 2025 (arXiv:2505.06708). Phi-3 has `rope_scaling="longrope"`
    with `rope_divisors`, one set for texts of up to `original_length`, which refuses longer ones, and one for those
    (`rope_length="extended"`). `ff_dim` is 8/3 dim unless given. Rotated pairs are the halves of a head, as in all
    published weights. `kernel`, `sinks`, `memory_length` and `loops` make a trained model another one: see `manyformer
    convert`; `parts` are those of `baseline-2026`. Raises UserError for `full_every`, `sinks` and `window_rope_base`
    without `window`, for divisors without longrope, and for a scale of scores with a kernel that has its own.
    """
    _check_windows(window, full_every, sinks, kernel)
    if window_rope_base is not None and window is None:
        raise UserError(f"window_rope_base ({window_rope_base}) is for layers of windows: set window too")
    if kernel != "softmax" and score_scale is not None:
        raise UserError(f"score_scale ({score_scale}) is one of softmax; kernel {kernel} has its own")
    width = head_width(dim, heads, head_dim)
    scaling = _rotary_scaling(rope_scaling, rope_factor, original_length, rope_divisors, rope_length)
    rotary = RotaryPosition(width, rotated=rotated_dim, pairs="halves", base=rope_base, scaling=scaling)

    # a short reach needs no long waves: Gemma 3 has a smaller base, without scaling, in layers of windows
    window_rotary = rotary
    if window_rope_base is not None:
        window_rotary = RotaryPosition(width, rotated=rotated_dim, pairs="halves", base=window_rope_base)

    def make_position(number: int, *, sees_all: bool) -> Position:
        # layers without rotation see order through those with it (SmolLM3)
        is_rotated = unrotated_every is None or (number + 1) % unrotated_every
        position: Position = NoPosition()
        if is_rotated:
            position = rotary if sees_all else window_rotary
        # normalized, rotated, multiplied, capped: in this order
        before = [HeadNorm(width, eps=norm_eps)] if qk_norm else []
        after = [] if score_cap is None else [ScoreCap(score_cap)]
        if before or after:
            return ComposedPosition(*before, position, *after)
        return position

    def make_kernel() -> Kernel:
        if kernel != "softmax":
            window_size = WINDOW if window is None else window
            sizes = AttentionSizes(
                width * heads, heads, kv_heads or heads, original_length, window=window_size, sinks=sinks or 0
            )
            if memory_length is not None and causal_kernel(kernel, sizes).recurrent:
                raise UserError(f"memory_length ({memory_length}) is one of tokens, and kernel {kernel} keeps none")
            return causal_kernel(kernel, sizes)
        mask = Causal() if window is None else causal_window(window, sinks or 0)
        return SoftmaxKernel(mask, scale=score_scale)

    def make_gate() -> GatedNormStage:
        return GatedNormStage(gate=HeadProjection(dim, heads, width), activation=torch.sigmoid)

    def layer(number: int) -> dict[str, Layer]:
        sees_all = full_every is not None and (number + 1) % full_every == 0
        attention = Attention(
            dim,
            heads,
            SoftmaxKernel(Causal(), scale=score_scale) if sees_all else make_kernel(),
            kv_heads=kv_heads,
            head_dim=width,
            value_dim=width,
            position=make_position(number, sees_all=sees_all),
            source=None if memory_length is None else SegmentMemorySource(memory_length, dim),
            output_stage=make_gate() if output_gate else None,
            bias=biases != "none",
            # Qwen2 has biases of queries, keys and values alone
            out_bias=biases == "all",
        )
        return {
            "attention": attention,
            "ff": GatedFeedForward(dim, ff_dim, activation=GATE_ACTIVATIONS[ff_activation]()),
        }

    model = rms_decoder(
        vocab,
        dim,
        depth,
        layer,
        dropout=dropout,
        norm_order=norm_order,
        norm_eps=norm_eps,
        tied=tied,
        logit_cap=logit_cap,
        embedding_scale=dim**0.5 if scaled_embedding else 1.0,
        loops=loops,
        streams=residual_streams_of(residual_streams, dim, count=stream_count, block_layers=block_layers),
    )
    norm = partial(RMSNorm, dim, norm_eps)
    return add_ahead_layers(
        add_speedrun_parts(model, **parts),
        layer,
        partial(complete_layer, order=norm_order, norm=norm, dropout=dropout),
        norm,
        depth=depth,
        std=init_std(dim),
        ahead=ahead,
        ahead_tokens=ahead_tokens,
        ahead_weight=ahead_weight,
    )


def _check_windows(window: int | None, full_every: int | None, sinks: int | None, kernel: str) -> None:
    """Raise UserError for settings of windows where there are none."""
    if full_every is not None and window is None and kernel == "softmax":
        raise UserError(f"full_every ({full_every}) is for layers of windows: set window too, or another kernel")
    if sinks is not None and window is None:
        raise UserError(f"sinks ({sinks}) belong to windows: set window too")


def read_divisors(text: str | None) -> dict[str, tuple[float, ...]]:
    """The numbers in `rope_divisors`, for original and extended texts, which share a single set. Raises UserError."""
    try:
        sets = [tuple(map(float, part.split(","))) for part in (text or "").split("/")]
        original, extended = sets if len(sets) > 1 else sets * 2
    except ValueError:
        example = "numbers with commas, such as 1,1.5, and after a slash those for longer texts"
        raise UserError(f"rope_scaling=longrope needs rope_divisors, {example}: not {text!r:.60}") from None
    return {"original": original, "extended": extended}


def _rotary_scaling(
    kind: str, factor: float, original_length: int, divisors: str | None, length: str
) -> RotaryScaling | None:
    """The scaling that the settings of rotary positions name; None for none. Raises UserError."""
    is_original = length == "original"
    if kind == "longrope":
        return LongRoPERotaryScaling(read_divisors(divisors)[length], factor, original_length, is_original=is_original)
    if divisors is not None or not is_original:
        raise UserError(f"rope_divisors and rope_length are those of rope_scaling=longrope, and it is {kind}")
    if kind == "linear":
        return LinearRotaryScaling(factor)
    if kind == "ntk":
        return NTKRotaryScaling(factor)
    if kind == "llama3":
        return Llama3RotaryScaling(factor, original_length)
    if kind == "yarn":
        return YaRNRotaryScaling(factor, original_length)
    return None
