"""Qwen3-Next: three layers of the gated delta rule to one of gated softmax attention, and experts."""

from collections.abc import Callable
from functools import partial

import torch

from manyformer.base.errors import UserError
from manyformer.models import LanguageModel
from manyformer.models.tasks.language_modelling import LANGUAGE_MODELLING
from manyformer.nn.attention.attention import Attention
from manyformer.nn.attention.output_stages import GatedNormStage
from manyformer.nn.core import Layer
from manyformer.nn.feed_forward import GatedExperts, LoadBalanceLoss, MixtureOfExperts, ScalarGate, SoftmaxRouter
from manyformer.nn.feed_forward.feedforward import GatedFeedForward
from manyformer.nn.masks import Causal
from manyformer.nn.positions import ComposedPosition, HeadNorm, RotaryPosition
from manyformer.nn.runtime.head_selection import HeadProjection
from manyformer.nn.softmax.softmax_kernel import SoftmaxKernel
from manyformer.recipes.parts.baselines import LayerMaker, head_width, makers_of_pattern, rms_decoder
from manyformer.recipes.parts.keywords import (
    BalanceWeight,
    DeltaHeads,
    DeltaKeyDim,
    DeltaKeyHeads,
    DeltaPattern,
    DeltaValueDim,
    ExpertCount,
    ExpertDim,
    ExpertsPerToken,
    ExpertWeights,
    HeadDim,
    NormEps,
    QuarterRotatedDim,
    RopeBase,
    SharedExpertDim,
    ShortConvolutionSize,
    TiedOutput,
)
from manyformer.recipes.parts.recurrent_layers import RecurrentSizes, gated_delta_attention
from manyformer.recipes.parts.registry import recipe


@recipe(
    "Qwen3-Next",
    paper="Yang et al. 2024, Gated Delta Networks: Improving Mamba2 with Delta Rule, arXiv:2412.06464, sections 3.4 "
    "and 4, with the gated attention of Qiu et al. 2025, arXiv:2505.06708; sizes of the released models",
    summary="Three layers with a corrected memory of constant size to one that attends to all tokens, and experts.",
    task=LANGUAGE_MODELLING,
    family="hybrid",
    cost="O(l^2 d) in one layer of four, O(l d^2) in the others, with the experts of a token alone",
    reasons={
        "bfloat16": "rounded inputs of a router may choose another expert",
        "attention_dropout": "layers of the delta rule form no weights of softmax",
        "convex_weights": "the memory of the delta rule is corrected, not averaged",
        "removable_heads": "heads of the delta rule share keys",
    },
    tiny_keywords={
        "kv_heads": 1,
        "pattern": "LF",
        "delta_heads": 4,
        "delta_key_heads": 2,
        "delta_head_dim": 4,
        "delta_value_dim": 6,
        "expert_dim": 16,
        "shared_expert_dim": 12,
        "num_experts": 4,
        "experts_per_token": 2,
    },
)
def qwen3_next(
    vocab: int = 32000,
    dim: int = 512,
    depth: int = 8,
    heads: int = 8,
    kv_heads: int | None = 1,
    head_dim: HeadDim = None,
    rotated_dim: QuarterRotatedDim = None,
    pattern: DeltaPattern = "LLLF",
    delta_heads: DeltaHeads = 8,
    delta_key_heads: DeltaKeyHeads = 4,
    delta_head_dim: DeltaKeyDim = 64,
    delta_value_dim: DeltaValueDim = 64,
    conv_size: ShortConvolutionSize = 4,
    expert_dim: ExpertDim = 128,
    shared_expert_dim: SharedExpertDim = 128,
    num_experts: ExpertCount = 16,
    experts_per_token: ExpertsPerToken = 4,
    expert_weighting: ExpertWeights = "renormalized",
    rope_base: RopeBase = 1e7,
    balance_weight: BalanceWeight = 1e-3,
    *,
    norm_eps: NormEps = 1e-6,
    tied: TiedOutput = False,
    dropout: float = 0.0,
) -> LanguageModel:
    """Smaller than published: 80B-A3B has dim=2048, depth=48, heads=16, kv_heads=2, head_dim=256, delta_heads=32.

    It has delta_key_heads=16 of 128 channels, 512 experts of width 512 of which a token visits 10, and a shared one,
    times a gate. Full attention normalizes queries and keys in each head, rotates a part of them, and gates its
    outputs, channel by channel, with a sigmoid. Gains of norms are stored as differences from 1 there, so that weight
    decay draws them to 1; ours are not decayed. The prediction of tokens further ahead is not part of the recipe.
    Raises UserError for a pattern with other letters, and for heads and experts that do not fit."""
    mixers = gated_hybrid_mixers(
        RecurrentSizes(dim, delta_heads, delta_head_dim, delta_value_dim, delta_key_heads),
        heads,
        kv_heads,
        head_width(dim, heads, head_dim),
        rotated_dim,
        conv_size=conv_size,
        rope_base=rope_base,
        norm_eps=norm_eps,
    )
    losses: list[LoadBalanceLoss] = []
    if balance_weight:
        losses.append(LoadBalanceLoss(balance_weight))

    def layer(number: int, letter: str) -> dict[str, Layer]:
        attention = mixers[letter]()
        router = SoftmaxRouter(dim, num_experts, experts_per_token, weighting=expert_weighting)
        # every token visits it, times a sigmoid of the token
        shared = ScalarGate(GatedFeedForward(dim, shared_expert_dim), dim)
        experts = MixtureOfExperts(router, GatedExperts(num_experts, dim, expert_dim), shared=shared, losses=losses)
        return {"attention": attention, "ff": experts}

    makers: dict[str, LayerMaker] = {letter: partial(layer, letter=letter) for letter in mixers}
    layers = makers_of_pattern(pattern, makers)
    return rms_decoder(vocab, dim, depth, layers, dropout=dropout, norm_eps=norm_eps, tied=tied)


def gated_hybrid_mixers(
    sizes: RecurrentSizes,
    heads: int,
    kv_heads: int | None,
    width: int,
    rotated_dim: int | None,
    *,
    conv_size: int,
    rope_base: float,
    norm_eps: float,
) -> dict[str, Callable[[], Attention]]:
    """The makers of the gated delta rule (L), of `sizes`, and of gated full attention (F), whose heads have `width`.

    Raises UserError for heads that do not fit, and for a `rotated_dim` that a head does not have."""
    if sizes.heads % sizes.key_heads:
        raise UserError(f"delta_heads ({sizes.heads}) must be a multiple of delta_key_heads ({sizes.key_heads})")
    if rotated_dim is None:
        rotated = max(2, width // 8 * 2)
    else:
        rotated = rotated_dim
    if rotated % 2 or rotated > width:
        raise UserError(f"rotated_dim ({rotated}) must be even and at most the width of a head ({width})")
    rotary = RotaryPosition(width, rotated=rotated, pairs="halves", base=rope_base)

    def full_attention() -> Attention:
        return Attention(
            sizes.dim,
            heads,
            SoftmaxKernel(Causal()),
            kv_heads=kv_heads,
            head_dim=width,
            value_dim=width,
            # first the norm of each head's query and key, then the rotation, which keeps their length
            position=ComposedPosition(HeadNorm(width, eps=norm_eps), rotary),
            # a gate lets a head write nothing, so that no token has to serve as a sink of attention
            output_stage=GatedNormStage(gate=HeadProjection(sizes.dim, heads, width), activation=torch.sigmoid),
            bias=False,
        )

    # value heads share the keys of a group, as in grouped attention
    delta = partial(gated_delta_attention, sizes, conv_size=conv_size, norm_eps=norm_eps)
    return {"L": delta, "F": full_attention}
