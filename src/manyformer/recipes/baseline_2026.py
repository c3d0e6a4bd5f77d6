"""A baseline of 2026: the decoder that public speedruns of small language models have settled on."""

from functools import partial
from typing import Annotated, Literal

from annotated_types import Gt
from torch import nn

from manyformer.models import LanguageModel, TokenEmbedding
from manyformer.models.tasks.language_modelling import LANGUAGE_MODELLING
from manyformer.nn.attention.attention import Attention
from manyformer.nn.core import Layer
from manyformer.nn.feed_forward.feedforward import FeedForward, GatedFeedForward, SquaredReLU
from manyformer.nn.masks import Causal, Mask
from manyformer.nn.positions import ComposedPosition, HeadNorm, Position, RotaryPosition
from manyformer.nn.runtime.length_norms import RMSNorm
from manyformer.nn.softmax.softmax_kernel import SoftmaxKernel
from manyformer.recipes.parts.attention_kernels import causal_window
from manyformer.recipes.parts.baselines import LayerMaker, head_width, init_std, language_model, makers_of_pattern
from manyformer.recipes.parts.keywords import CausalWindowSize, HeadDim, NormEps, RopeBase, TiedOutput
from manyformer.recipes.parts.registry import recipe
from manyformer.recipes.parts.speedrun_parts import (
    Backout,
    CanonPlaces,
    EmbeddingSkip,
    LogitCap,
    SmearedEmbedding,
    UNetSkips,
    ValueEmbeddings,
    ValueSharing,
    ZeroOutputs,
    add_speedrun_parts,
)

HEAD_STD = 0.001
"""The deviation of the output matrix, with which all tokens are about equally probable at first."""


@recipe(
    "Baseline of 2026",
    paper="none: the public speedruns of GPT-2, and nanochat (Karpathy 2025); Jordan et al. 2024, modded-nanogpt",
    summary="A Llama with the parts that speedruns kept: each is a keyword, and can be switched off.",
    task=LANGUAGE_MODELLING,
    family="softmax",
    cost="O(l w d + l d^2) per layer with windows w, O(l^2 d + l d^2) in every fourth and in the last",
    # with outputs of zeros no branch would act; of two layers the middle is the last, where backout is only a factor
    # before a norm
    tiny_keywords={"window": 4, "depth": 3, "zero_outputs": False},
)
def baseline_2026(
    vocab: int = 256,
    dim: int = 512,
    depth: int = 8,
    heads: int = 4,
    kv_heads: int | None = None,
    head_dim: HeadDim = None,
    ff_dim: int | None = None,
    windows: Annotated[str, "layers with a window (S) or without (L), repeated; the last layer never has one"] = "SSSL",
    window: CausalWindowSize = 256,
    dropout: float = 0.0,
    *,
    feedforward: Annotated[
        Literal["relu2", "swiglu"], "squared ReLU with 4 dim channels, or a gate with 8/3 dim"
    ] = "relu2",
    learned_norms: Annotated[bool, "norms have a weight for each channel"] = False,
    embedding_norm: Annotated[bool, "the embedding is normalized"] = True,
    qk_norm: Annotated[bool, "queries and keys are normalized in each head, without weights"] = True,
    qk_scale: Annotated[float, Gt(0), "factor of normalized queries, and of normalized keys"] = 1.2,
    rope_base: RopeBase = 100_000.0,
    zero_outputs: ZeroOutputs = True,
    tied: TiedOutput = False,
    logit_cap: LogitCap = 15.0,
    embedding_skip: EmbeddingSkip = True,
    value_embeddings: ValueEmbeddings = True,
    value_residual: ValueSharing = False,
    smear: SmearedEmbedding = True,
    backout: Backout = True,
    unet_skips: UNetSkips = False,
    canon: CanonPlaces = "",
    norm_eps: NormEps = 1e-6,
) -> LanguageModel:
    """Llama with squared ReLU, norms without weights, windows, and skips across depth, as in nanochat.

    Queries and keys are normalized and multiplied by `qk_scale`; the output is a matrix of its own, with capped
    logits. A stream x before layer n is keep_n x + embed_n x_0, where x_0 is the normalized, smeared embedding; the
    output of the middle layer is subtracted in the end. The parts that are off by default are those that nanochat
    does not have. Matrices begin with the deviation 1 / sqrt(dim), outputs of branches as zeros.
    """
    width = head_width(dim, heads, head_dim)
    rotary = RotaryPosition(width, pairs="halves", base=rope_base)
    position: Position = rotary
    if qk_norm:
        # without weights the norm could as well come after the rotation, which changes no length
        position = ComposedPosition(HeadNorm(width, eps=norm_eps, learned=False, scale=qk_scale), rotary)
    norm = partial(RMSNorm, dim, norm_eps, elementwise_affine=learned_norms)

    def layer(number: int, mask: Mask) -> dict[str, Layer]:
        # the last layer sees everything
        kernel = SoftmaxKernel(Causal() if number == depth - 1 else mask)
        attention = Attention(
            dim, heads, kernel, kv_heads=kv_heads, head_dim=width, value_dim=width, position=position, bias=False
        )
        if feedforward == "relu2":
            return {"attention": attention, "ff": FeedForward(dim, ff_dim, activation=SquaredReLU(), bias=False)}
        return {"attention": attention, "ff": GatedFeedForward(dim, ff_dim)}

    kinds: dict[str, LayerMaker] = {
        "S": partial(layer, mask=causal_window(window, 0)),
        "L": partial(layer, mask=Causal()),
    }
    embed = TokenEmbedding(vocab, dim, std=init_std(dim), norm=norm() if embedding_norm else None, dropout=dropout)
    model = language_model(
        embed,
        depth,
        makers_of_pattern(windows, kinds, "windows"),
        dropout=dropout,
        norm=norm,
        tied=tied,
        logit_cap=logit_cap,
        scaled_init=False,
    )
    for module in model.body.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=dim**-0.5)
    if not tied:
        nn.init.normal_(model.head.get_parameter("weight"), std=HEAD_STD)
    return add_speedrun_parts(
        model,
        zero_outputs=zero_outputs,
        embedding_skip=embedding_skip,
        value_embeddings=value_embeddings,
        value_residual=value_residual,
        smear=smear,
        backout=backout,
        unet_skips=unet_skips,
        canon=canon,
    )
