"""Samba: Mamba and sliding windows of softmax attention in turn, each with a feed-forward layer."""

from typing import Annotated

from manyformer.models import LanguageModel
from manyformer.models.tasks.language_modelling import LANGUAGE_MODELLING
from manyformer.nn.attention.attention import Attention
from manyformer.nn.core import Layer
from manyformer.nn.feed_forward.feedforward import GatedFeedForward
from manyformer.nn.positions import RotaryPosition
from manyformer.nn.recurrent.mamba_mixer import MambaMixer, default_rank
from manyformer.nn.softmax.softmax_kernel import SoftmaxKernel
from manyformer.recipes.parts.attention_kernels import causal_window
from manyformer.recipes.parts.baselines import LayerMaker, head_width, makers_of_pattern, rms_decoder
from manyformer.recipes.parts.keywords import (
    CausalWindowSize,
    ChannelConvolutionSize,
    ChannelExpansion,
    ChannelMemorySize,
    HeadDim,
    NormEps,
    RopeBase,
    TiedOutput,
)
from manyformer.recipes.parts.registry import recipe


@recipe(
    "Samba",
    paper="Ren et al. 2024, Samba: Simple Hybrid State Space Models for Efficient Unlimited Context Language Modeling, "
    "arXiv:2406.07522",
    summary="Mamba remembers what a window of softmax attention no longer sees; nothing grows with the text.",
    task=LANGUAGE_MODELLING,
    family="hybrid",
    constant_state=True,
    cost="O(l w d) in layers with windows w, O(l d^2) in the others; windows cache w tokens",
    tiny_keywords={"kv_heads": 1, "depth": 2, "state_dim": 4, "window": 5},
)
def samba(
    vocab: int = 32000,
    dim: int = 512,
    depth: int = 8,
    heads: int = 8,
    kv_heads: int | None = 2,
    head_dim: HeadDim = None,
    ff_dim: int | None = None,
    pattern: Annotated[str, "kinds of layers, repeated: m is Mamba, W a window of softmax attention"] = "mW",
    window: CausalWindowSize = 256,
    state_dim: ChannelMemorySize = 16,
    expansion: ChannelExpansion = 2,
    conv_size: ChannelConvolutionSize = 4,
    rope_base: RopeBase = 10_000.0,
    *,
    norm_eps: NormEps = 1e-5,
    tied: TiedOutput = False,
    dropout: float = 0.0,
) -> LanguageModel:
    """Section 2.1: Mamba, SwiGLU, a window with rotary positions, SwiGLU, and so on; the paper's window is 2048.

    A layer here is one of the two mixers with its feed-forward layer, of which the paper counts each. Raises UserError
    for a pattern with other letters."""
    width = head_width(dim, heads, head_dim)
    rotary = RotaryPosition(width, pairs="halves", base=rope_base)

    def mamba(number: int) -> dict[str, Layer]:
        mixer = MambaMixer(dim, expansion * dim, state_dim=state_dim, rank=default_rank(dim), conv_size=conv_size)
        return {"mixer": mixer, "ff": GatedFeedForward(dim, ff_dim)}

    def windowed(number: int) -> dict[str, Layer]:
        attention = Attention(
            dim,
            heads,
            SoftmaxKernel(causal_window(window, 0)),
            kv_heads=kv_heads,
            head_dim=width,
            value_dim=width,
            position=rotary,
            bias=False,
        )
        return {"attention": attention, "ff": GatedFeedForward(dim, ff_dim)}

    makers: dict[str, LayerMaker] = {"m": mamba, "W": windowed}
    layers = makers_of_pattern(pattern, makers)
    return rms_decoder(vocab, dim, depth, layers, dropout=dropout, norm_eps=norm_eps, tied=tied)
