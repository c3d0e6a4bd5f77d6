"""Kimi Linear: three layers of Kimi Delta Attention to one of latent attention without positions, and experts."""

from functools import partial
from typing import Annotated

from manyformer.models import LanguageModel
from manyformer.models.tasks.language_modelling import LANGUAGE_MODELLING
from manyformer.nn.attention.attention import MultiHeadLayer
from manyformer.nn.attention.latent_attention import LatentAttention
from manyformer.nn.core import Layer
from manyformer.nn.feed_forward import GatedExperts, MixtureOfExperts, SelectionBias, SequenceBalanceLoss, SigmoidRouter
from manyformer.nn.feed_forward.feedforward import GatedFeedForward
from manyformer.nn.masks import Causal
from manyformer.recipes.deepseek import LATENT_EPS
from manyformer.recipes.kda import kimi_delta_attention
from manyformer.recipes.parts.baselines import LayerMaker, makers_of_pattern, rms_decoder
from manyformer.recipes.parts.keywords import (
    BalanceBiasStep,
    BalanceWeight,
    DeltaValueDim,
    DenseLayerCount,
    ExpertCount,
    ExpertDim,
    ExpertsPerToken,
    ExpertWeightFactor,
    ExpertWeights,
    LatentDim,
    NormEps,
    PositiveSize,
    SharedExpertCount,
    ShortConvolutionSize,
    TiedOutput,
)
from manyformer.recipes.parts.recurrent_layers import RecurrentSizes
from manyformer.recipes.parts.registry import recipe


@recipe(
    "Kimi Linear",
    paper="Kimi Team 2025, Kimi Linear: An Expressive, Efficient Attention Architecture, arXiv:2510.26692",
    summary="Three layers with a corrected memory to one that caches a narrow latent of each token, without positions.",
    task=LANGUAGE_MODELLING,
    family="hybrid",
    cost="O(l^2 d) in one layer of four, O(l d^2) in the others, with the experts of a token alone",
    reasons={
        "bfloat16": "rounded inputs of a router may choose another expert",
        "attention_dropout": "layers of the delta rule form no weights of softmax",
        "convex_weights": "the memory of the delta rule is corrected, not averaged",
    },
    tiny_keywords={
        "pattern": "AF",
        "delta_heads": 2,
        "delta_head_dim": 6,
        "head_dim": 8,
        "shared_key_dim": 4,
        "value_dim": 6,
        "latent_dim": 12,
        "expert_dim": 16,
        "num_experts": 4,
        "experts_per_token": 2,
        "dense_layers": 1,
    },
)
def kimi_linear(
    vocab: int = 32000,
    dim: int = 512,
    depth: int = 8,
    heads: int = 8,
    pattern: Annotated[
        str, "kinds of layers, repeated: A has Kimi Delta Attention, F latent attention to all tokens"
    ] = "AAAF",
    delta_heads: Annotated[PositiveSize, "heads of Kimi Delta Attention"] = 8,
    delta_head_dim: Annotated[PositiveSize, "width of a head's keys and values there"] = 64,
    conv_size: ShortConvolutionSize = 4,
    head_dim: Annotated[PositiveSize, "width of the part of a head's keys and queries in latent attention"] = 64,
    shared_key_dim: Annotated[PositiveSize, "width of the part of a key there that all heads share"] = 32,
    value_dim: DeltaValueDim = 64,
    latent_dim: LatentDim = 128,
    ff_dim: int | None = None,
    expert_dim: ExpertDim = 128,
    shared_experts: SharedExpertCount = 1,
    num_experts: ExpertCount = 16,
    experts_per_token: ExpertsPerToken = 4,
    expert_scale: ExpertWeightFactor = 2.446,
    expert_weighting: ExpertWeights = "renormalized",
    dense_layers: DenseLayerCount = 1,
    bias_rate: BalanceBiasStep = 1e-3,
    balance_weight: BalanceWeight = 1e-4,
    *,
    norm_eps: NormEps = 1e-5,
    tied: TiedOutput = False,
    dropout: float = 0.0,
) -> LanguageModel:
    """Section 4, smaller than published: 48B-A3B has dim=2304, depth=27, heads=32, ff_dim=9216, delta_heads=32.

    It has delta_head_dim=128, head_dim=128, shared_key_dim=64, value_dim=128, latent_dim=512, and num_experts=256 of
    width 1024, of which a token visits 8 and a shared one. Latent attention is that of DeepSeek-V3 without a latent of
    queries and without positions: the part of a key that would be rotated is not, and is still shared by all heads.
    `ff_dim` is the width in `dense_layers`, 8/3 dim unless given. Raises UserError for a pattern with other letters and
    for experts that do not fit."""
    sizes = RecurrentSizes(dim, delta_heads, delta_head_dim, delta_head_dim, delta_heads)
    losses = [SequenceBalanceLoss(balance_weight)] if balance_weight else []

    def latent_attention() -> MultiHeadLayer:
        return LatentAttention(
            dim,
            heads,
            Causal(),
            latent_dim=latent_dim,
            query_latent_dim=None,
            head_dim=head_dim,
            rotary_dim=shared_key_dim,
            value_dim=value_dim,
            norm_eps=LATENT_EPS,
        )

    def delta_attention() -> MultiHeadLayer:
        return kimi_delta_attention(sizes, conv_size=conv_size, norm_eps=norm_eps)

    def feedforward(number: int) -> Layer:
        if number < dense_layers:
            return GatedFeedForward(dim, ff_dim)
        router = SigmoidRouter(
            dim,
            num_experts,
            experts_per_token,
            weighting=expert_weighting,
            scale=expert_scale,
            selection_bias=SelectionBias(num_experts, bias_rate),
        )
        shared = GatedFeedForward(dim, shared_experts * expert_dim)
        return MixtureOfExperts(router, GatedExperts(num_experts, dim, expert_dim), shared=shared, losses=losses)

    def layer(number: int, *, is_full: bool) -> dict[str, Layer]:
        attention = latent_attention() if is_full else delta_attention()
        return {"attention": attention, "ff": feedforward(number)}

    makers: dict[str, LayerMaker] = {"A": partial(layer, is_full=False), "F": partial(layer, is_full=True)}
    layers = makers_of_pattern(pattern, makers)
    return rms_decoder(vocab, dim, depth, layers, dropout=dropout, norm_eps=norm_eps, tied=tied)
