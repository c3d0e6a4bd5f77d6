"""Falcon-H1: Mamba-2 and softmax attention side by side in every layer, with multipliers of what each writes."""

from collections.abc import Sequence
from typing import Annotated, NamedTuple

from annotated_types import Gt
from torch import nn

from manyformer.base.errors import UserError
from manyformer.models import ClassHead, LanguageModel, TokenEmbedding
from manyformer.models.tasks.language_modelling import LANGUAGE_MODELLING
from manyformer.nn.attention.attention import Attention
from manyformer.nn.attention.output_stages import GatedNormStage
from manyformer.nn.core import Layer, ParallelLayers
from manyformer.nn.feed_forward.feedforward import GatedFeedForward
from manyformer.nn.linear.linear_kernel import LinearKernel
from manyformer.nn.linear.recurrent_rules import StateSpaceRule
from manyformer.nn.masks import Causal
from manyformer.nn.positions import RotaryPosition
from manyformer.nn.runtime.head_selection import HeadProjection
from manyformer.nn.runtime.length_norms import RMSNorm
from manyformer.nn.runtime.scaled_linear import ConstantScale, ScaledLinear
from manyformer.nn.softmax.softmax_kernel import SoftmaxKernel
from manyformer.recipes.parts.baselines import head_width, init_std, stack
from manyformer.recipes.parts.keywords import (
    HeadDim,
    NormEps,
    RopeBase,
    ShortConvolutionSize,
    StateSpaceGroups,
    StateSpaceHeadDim,
    StateSpaceHeads,
    StateSpaceKeyDim,
    TiedOutput,
)
from manyformer.recipes.parts.recurrent_layers import RecurrentSizes, state_space_attention
from manyformer.recipes.parts.registry import recipe

Multiplier = Annotated[float, Gt(0)]


class _AttentionMultipliers(NamedTuple):
    """Factors of the input of attention, of its keys, and of its output."""

    inputs: float
    keys: float
    outputs: float


class _StateMultipliers(NamedTuple):
    """Factors of the input of Mamba-2, of its gate, x, B, C and dt as they are projected, and of its output."""

    inputs: float
    parts: tuple[float, float, float, float, float]
    outputs: float


@recipe(
    "Falcon-H1",
    paper="TII 2025, Falcon-H1: A Family of Hybrid-Head Language Models, arXiv:2507.22448",
    summary="Every layer adds softmax attention and Mamba-2 of the same input, then a feed-forward layer.",
    task=LANGUAGE_MODELLING,
    family="hybrid",
    cost="O(l^2 d + l d^2) per layer; the cache of attention grows, with few key heads, the memory of Mamba-2 does not",
    reasons={
        "attention_dropout": "Mamba-2 forms no weights of softmax",
        "convex_weights": "weights of Mamba-2 are products of any sign",
        "removable_heads": "heads of Mamba-2 share keys, and outputs of linear maps are multiplied by constants",
    },
    tiny_keywords={
        "kv_heads": 1,
        "state_heads": 4,
        "state_head_dim": 6,
        "groups": 2,
        "state_dim": 5,
        "embedding_multiplier": 2.0,
        "logit_multiplier": 0.5,
        "key_multiplier": 0.7,
        "attention_in_multiplier": 1.2,
        "attention_out_multiplier": 0.8,
        "state_in_multiplier": 1.1,
        "state_out_multiplier": 0.9,
        "state_gate_multiplier": 0.9,
        "state_value_multiplier": 1.1,
        "state_key_multiplier": 0.8,
        "state_query_multiplier": 1.2,
        "step_multiplier": 0.7,
        "gate_multiplier": 0.8,
        "down_multiplier": 1.3,
    },
)
def falcon_h1(
    vocab: int = 32000,
    dim: int = 512,
    depth: int = 8,
    heads: int = 8,
    kv_heads: int | None = 2,
    head_dim: HeadDim = None,
    ff_dim: int | None = None,
    state_heads: StateSpaceHeads = 8,
    state_head_dim: StateSpaceHeadDim = 64,
    groups: StateSpaceGroups = 1,
    state_dim: StateSpaceKeyDim = 128,
    conv_size: ShortConvolutionSize = 4,
    rope_base: RopeBase = 1e11,
    embedding_multiplier: Annotated[Multiplier, "factor of the embedding"] = 1.0,
    logit_multiplier: Annotated[Multiplier, "factor of the logits"] = 1.0,
    attention_in_multiplier: Annotated[Multiplier, "factor of what attention projects"] = 1.0,
    key_multiplier: Annotated[Multiplier, "factor of the keys of attention"] = 1.0,
    attention_out_multiplier: Annotated[Multiplier, "factor of what attention adds"] = 1.0,
    state_in_multiplier: Annotated[Multiplier, "factor of what Mamba-2 projects"] = 1.0,
    state_gate_multiplier: Annotated[Multiplier, "factor of the gate of Mamba-2 (z)"] = 1.0,
    state_value_multiplier: Annotated[Multiplier, "factor of the values of Mamba-2 (x)"] = 1.0,
    state_key_multiplier: Annotated[Multiplier, "factor of the keys of Mamba-2 (B)"] = 1.0,
    state_query_multiplier: Annotated[Multiplier, "factor of the queries of Mamba-2 (C)"] = 1.0,
    step_multiplier: Annotated[Multiplier, "factor of the gate of Mamba-2's step sizes (dt)"] = 1.0,
    state_out_multiplier: Annotated[Multiplier, "factor of what Mamba-2 adds"] = 1.0,
    gate_multiplier: Annotated[Multiplier, "factor of the gate of feed-forward layers"] = 1.0,
    down_multiplier: Annotated[Multiplier, "factor of what feed-forward layers add"] = 1.0,
    *,
    norm_eps: NormEps = 1e-5,
    tied: TiedOutput = False,
    dropout: float = 0.0,
) -> LanguageModel:
    """Sections 2 and 3, smaller than published: 1.5B has dim=2048, depth=24, heads=8, kv_heads=2, head_dim=128.

    It has ff_dim=4096, state_heads=48 of 64 channels, state_dim=256. Mamba-2 has its gate, but no norm after it. The
    multipliers are constants that the authors tuned for each size; they act on the outputs of linear maps, and all are
    1 unless given. Raises UserError for heads that do not fit."""
    width = head_width(dim, heads, head_dim)
    if state_heads % groups:
        raise UserError(f"state_heads ({state_heads}) must be a multiple of groups ({groups})")
    sizes = RecurrentSizes(dim, state_heads, state_dim, state_head_dim, groups)
    of_attention = _AttentionMultipliers(attention_in_multiplier, key_multiplier, attention_out_multiplier)
    of_parts = (
        state_gate_multiplier,
        state_value_multiplier,
        state_key_multiplier,
        state_query_multiplier,
        step_multiplier,
    )
    of_state = _StateMultipliers(state_in_multiplier, of_parts, state_out_multiplier)
    rotary = RotaryPosition(width, pairs="halves", base=rope_base)

    def layer(number: int) -> dict[str, Layer]:
        attention = Attention(
            dim,
            heads,
            SoftmaxKernel(Causal()),
            kv_heads=kv_heads,
            head_dim=width,
            value_dim=width,
            position=rotary,
            bias=False,
        )
        _scale_attention(attention, of_attention)
        memory = state_space_attention(sizes, conv_size=conv_size, normalized=False)
        _scale_state_space(memory, of_state)
        ff = GatedFeedForward(dim, ff_dim)
        ff.gate = _scaled(ff.gate, gate_multiplier)
        ff.down = _scaled(ff.down, down_multiplier)
        return {"mixer": ParallelLayers(memory=memory, attention=attention), "ff": ff}

    def norm() -> RMSNorm:
        return RMSNorm(dim, norm_eps)

    std = init_std(dim)
    embed = TokenEmbedding(vocab, dim, scale=embedding_multiplier, std=std, dropout=dropout)
    body = stack(depth, layer, order="pre", norm=norm, dropout=dropout, std=std)
    transform = None if logit_multiplier == 1 else ConstantScale(logit_multiplier)
    return LanguageModel(embed, body, ClassHead(dim, vocab, tied=embed.token if tied else None, transform=transform))


def _scaled(linear: nn.Linear, *factors: float, rows: Sequence[int] | None = None) -> nn.Linear:
    """The map with a factor for each part of its rows, itself where all factors are 1."""
    if all(factor == 1 for factor in factors):
        return linear
    return ScaledLinear.replacing(linear, list(zip(rows or [linear.out_features], factors, strict=True)))


def _scale_attention(attention: Attention, factors: _AttentionMultipliers) -> None:
    """Multiply inputs, keys and outputs: without biases, a factor of the input is one of what is projected."""
    assert attention.q_proj is not None
    attention.q_proj = _scaled(attention.q_proj, factors.inputs)
    rows = attention.row_parts()["kv_proj.weight"]
    attention.kv_proj = _scaled(attention.kv_proj, factors.inputs * factors.keys, factors.inputs, rows=rows)
    attention.out_proj = _scaled(attention.out_proj, factors.outputs)


def _scale_state_space(memory: Attention, factors: _StateMultipliers) -> None:
    """The same for Mamba-2, whose queries are C, keys B and values x."""
    gate, x, b, c, dt = (factors.inputs * factor for factor in factors.parts)
    stage, kernel = memory.output_stage, memory.kernel
    assert memory.q_proj is not None
    assert isinstance(stage, GatedNormStage)
    assert stage.gate is not None
    assert isinstance(kernel, LinearKernel)
    assert isinstance(kernel.rule, StateSpaceRule)
    memory.q_proj = _scaled(memory.q_proj, c)
    memory.kv_proj = _scaled(memory.kv_proj, b, x, rows=memory.row_parts()["kv_proj.weight"])
    stage.gate.up = _scaled(stage.gate.up, gate)
    steps = kernel.rule.gate_projection
    assert isinstance(steps, HeadProjection)
    steps.up = _scaled(steps.up, dt)
    memory.out_proj = _scaled(memory.out_proj, factors.outputs)
