"""The decoder-only Transformer language model."""

from functools import partial
from typing import Unpack

from torch import nn

from manyformer.models import LanguageModel
from manyformer.models.tasks.language_modelling import LANGUAGE_MODELLING
from manyformer.nn.attention.attention import Attention
from manyformer.nn.core import Layer
from manyformer.nn.feed_forward.feedforward import FeedForward, chunked
from manyformer.recipes.parts.ahead_layers import AheadKind, AheadTokens, AheadWeight, add_ahead_layers
from manyformer.recipes.parts.attention_kernels import (
    WINDOW,
    AttentionSizes,
    KernelName,
    KernelWindow,
    SinkCount,
    causal_kernel,
)
from manyformer.recipes.parts.baselines import (
    LoopCount,
    NormOrder,
    check_heads,
    complete_layer,
    init_std,
    language_model,
    learned_embedding,
)
from manyformer.recipes.parts.keywords import FeedForwardChunk, GeluApproximation, NormEps
from manyformer.recipes.parts.registry import recipe
from manyformer.recipes.parts.residual_streams import BlockLayers, ResidualStreams, StreamCount, residual_streams_of
from manyformer.recipes.parts.speedrun_parts import SpeedrunParts, add_speedrun_parts


@recipe(
    "Transformer language model",
    paper="Radford et al. 2019, Language Models are Unsupervised Multitask Learners; Liu et al. 2018, arXiv:1801.10198",
    summary="The decoder alone, without cross-attention, is a language model.",
    task=LANGUAGE_MODELLING,
    family="softmax",
    cost="O(l^2 d + l d^2) per layer",
)
def transformer_lm(
    vocab: int = 256,
    dim: int = 512,
    depth: int = 8,
    heads: int = 8,
    ff_dim: int | None = None,
    max_length: int = 1024,
    dropout: float = 0.0,
    norm_order: NormOrder = "pre",
    gelu_approximate: GeluApproximation = "none",
    residual_streams: ResidualStreams = "plain",
    ff_chunk: FeedForwardChunk = None,
    norm_eps: NormEps = 1e-5,
    kernel: KernelName = "softmax",
    window: KernelWindow = WINDOW,
    sinks: SinkCount = None,
    kv_heads: int | None = None,
    loops: LoopCount = 1,
    stream_count: StreamCount = None,
    block_layers: BlockLayers = None,
    ahead: AheadKind = "none",
    ahead_tokens: AheadTokens = None,
    ahead_weight: AheadWeight = None,
    **parts: Unpack[SpeedrunParts],
) -> LanguageModel:
    """Pre-norm, GELU, learned positions, tied output, as in GPT-2; `ff_dim` is 4 dim unless given.

    Attention weights have no dropout, unlike GPT-2's: on a CPU it costs six times the attention itself. GPT-2 takes
    `gelu_approximate="tanh"`, an approximation to within 5e-4 that on a CPU costs three times the exact function.
    Reversible layers and chunked feed-forward layers (Kitaev et al. 2020, section 3) save memory. `kernel`,
    `kv_heads` and `loops` make a trained model another one: see `manyformer convert`; `parts` are those of
    `baseline-2026`."""
    check_heads(dim, heads)
    # what any kernel of the table may need: one with a window takes the window, one with features the width
    sizes = AttentionSizes(dim, heads, kv_heads or heads, max_length, window=window, sinks=sinks or 0)

    def layer(number: int) -> dict[str, Layer]:
        return {
            "attention": Attention(dim, heads, causal_kernel(kernel, sizes), kv_heads=kv_heads),
            "ff": chunked(FeedForward(dim, ff_dim, activation=nn.GELU(gelu_approximate)), ff_chunk),
        }

    embed = learned_embedding(vocab, dim, max_length, dropout=dropout)
    norm = partial(nn.LayerNorm, dim, eps=norm_eps)
    streams = residual_streams_of(residual_streams, dim, count=stream_count, block_layers=block_layers)
    model = language_model(
        embed, depth, layer, dropout=dropout, norm_order=norm_order, norm=norm, streams=streams, loops=loops
    )
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
