"""DeepSeek-V3: latent attention, and a mixture of many small experts that a bias balances."""

from functools import partial
from typing import Annotated, Literal

from manyformer.base.errors import UserError
from manyformer.models import LanguageModel
from manyformer.models.tasks.language_modelling import LANGUAGE_MODELLING
from manyformer.nn.attention.latent_attention import LatentAttention, LightningIndexer
from manyformer.nn.core import Layer
from manyformer.nn.feed_forward import GatedExperts, MixtureOfExperts, SelectionBias, SequenceBalanceLoss, SigmoidRouter
from manyformer.nn.feed_forward.feedforward import GatedFeedForward
from manyformer.nn.masks import Causal
from manyformer.nn.positions import RotaryPosition, YaRNRotaryScaling
from manyformer.nn.positions.rotary import yarn_temperature
from manyformer.nn.runtime.length_norms import RMSNorm
from manyformer.recipes.parts.ahead_layers import AheadKind, AheadTokens, AheadWeight, add_ahead_layers
from manyformer.recipes.parts.baselines import complete_layer, init_std, rms_decoder
from manyformer.recipes.parts.keywords import (
    BalanceBiasStep,
    BalanceWeight,
    DenseLayerCount,
    ExpertCount,
    ExpertDim,
    ExpertsPerToken,
    ExpertWeightFactor,
    ExpertWeights,
    LatentDim,
    NormEps,
    PositiveSize,
    RopeBase,
    SharedExpertCount,
    TiedOutput,
    UnscaledLength,
    YarnFactor,
)
from manyformer.recipes.parts.registry import recipe

LATENT_EPS = 1e-6


@recipe(
    "DeepSeek-V3",
    paper="DeepSeek-AI 2024, DeepSeek-V3 Technical Report, arXiv:2412.19437",
    summary="Attention that caches one narrow latent per token, and many small experts balanced without a loss.",
    task=LANGUAGE_MODELLING,
    family="experts",
    cost="O(l^2 d + l d^2) per layer with the experts of a token alone; a cache of latent_dim + rotary_dim per token",
    reasons={"bfloat16": "rounded inputs of a router may choose another expert"},
    tiny_keywords={
        "head_dim": 8,
        "rotary_dim": 4,
        "value_dim": 6,
        "latent_dim": 12,
        "query_latent_dim": 16,
        "expert_dim": 16,
        "num_experts": 8,
        "experts_per_token": 3,
        "expert_groups": 4,
        "groups_per_token": 2,
        "dense_layers": 1,
        "indexed_tokens": 6,
        "indexer_heads": 3,
        "indexer_dim": 6,
    },
)
def deepseek(
    vocab: int = 32000,
    dim: int = 512,
    depth: int = 8,
    heads: int = 8,
    head_dim: Annotated[PositiveSize, "width of the part of a head's keys and queries without positions"] = 64,
    rotary_dim: Annotated[PositiveSize, "width of the key with rotary positions, which all heads share"] = 32,
    value_dim: Annotated[PositiveSize, "width of a head's values"] = 64,
    latent_dim: LatentDim = 128,
    query_latent_dim: Annotated[PositiveSize | None, "width of the latent of queries; null means none"] = 256,
    ff_dim: int | None = None,
    expert_dim: ExpertDim = 128,
    num_experts: ExpertCount = 16,
    experts_per_token: ExpertsPerToken = 4,
    shared_experts: SharedExpertCount = 1,
    expert_groups: Annotated[PositiveSize, "number of groups of experts; a token's experts come from few of them"] = 1,
    groups_per_token: Annotated[PositiveSize, "number of groups that a token's experts come from"] = 1,
    dense_layers: DenseLayerCount = 1,
    expert_scale: ExpertWeightFactor = 2.5,
    expert_weighting: ExpertWeights = "renormalized",
    bias_rate: BalanceBiasStep = 1e-3,
    balance_weight: BalanceWeight = 1e-4,
    rope_base: RopeBase = 10_000.0,
    rope_factor: YarnFactor = 1.0,
    original_length: UnscaledLength = 4096,
    rope_pairs: Annotated[
        Literal["interleaved", "halves"], "channels that are rotated together; weights of V2 and V3 have interleaved"
    ] = "interleaved",
    indexed_tokens: Annotated[
        PositiveSize | None, "tokens that an indexer chooses for each query (V3.2); null means that it attends to all"
    ] = None,
    indexer_heads: Annotated[PositiveSize, "number of heads of the indexer"] = 16,
    indexer_dim: Annotated[PositiveSize, "width of a head of the indexer"] = 64,
    *,
    norm_eps: NormEps = 1e-6,
    tied: TiedOutput = False,
    dropout: float = 0.0,
    ahead: AheadKind = "none",
    ahead_tokens: AheadTokens = None,
    ahead_weight: AheadWeight = None,
) -> LanguageModel:
    """Section 2.1, smaller than published; `ahead="sequential"` is the multi-token prediction of section 2.2.

    DeepSeek-V3 has dim=7168, depth=61, heads=128, head_dim=128, rotary_dim=64, value_dim=128, latent_dim=512,
    query_latent_dim=1536, ff_dim=18432, expert_dim=2048, num_experts=256, experts_per_token=8, expert_groups=8,
    groups_per_token=4, dense_layers=3 (section 4.2). `ff_dim` is the width in `dense_layers`, 8/3 dim unless given.
    DeepSeek-V3.2 has sparse attention, with indexed_tokens=2048, indexer_heads=64 and indexer_dim=128. Raises UserError
    for experts, groups and widths that do not fit, and for an indexer without a latent of queries."""
    if rotary_dim % 2:
        raise UserError(f"rotary_dim ({rotary_dim}) must be even: its channels are rotated in pairs")
    scaling = None
    if rope_factor > 1:
        scaling = YaRNRotaryScaling(rope_factor, original_length, magnitude=1.0)
    # only these channels are rotated: the latent that is cached must not depend on the position
    position = RotaryPosition(rotary_dim, pairs=rope_pairs, base=rope_base, scaling=scaling)
    if indexed_tokens is not None and (query_latent_dim is None or indexer_dim < rotary_dim):
        raise UserError(
            f"the indexer of indexed_tokens ({indexed_tokens}) needs query_latent_dim ({query_latent_dim}), and "
            f"rotary_dim ({rotary_dim}) of the indexer_dim ({indexer_dim}) channels of its heads"
        )
    # the temperature of YaRN acts on all channels, not on rotated ones alone
    score_scale = yarn_temperature(rope_factor) ** 2 * (head_dim + rotary_dim) ** -0.5
    losses: list[SequenceBalanceLoss] = []
    if balance_weight:
        losses.append(SequenceBalanceLoss(balance_weight))

    def feedforward(number: int) -> Layer:
        if number < dense_layers:
            return GatedFeedForward(dim, ff_dim)
        # loads are balanced by a bias that only selects experts, beside a very small loss (section 2.1.2)
        router = SigmoidRouter(
            dim,
            num_experts,
            experts_per_token,
            groups=expert_groups,
            groups_per_token=groups_per_token,
            weighting=expert_weighting,
            scale=expert_scale,
            selection_bias=SelectionBias(num_experts, bias_rate),
        )
        # experts that every token visits are one wider layer, which is the same function
        shared = GatedFeedForward(dim, shared_experts * expert_dim)
        return MixtureOfExperts(router, GatedExperts(num_experts, dim, expert_dim), shared=shared, losses=losses)

    def make_indexer() -> LightningIndexer | None:
        if indexed_tokens is None or query_latent_dim is None:
            return None
        # the weights have halves here, whatever the pairs of the attention
        index_position = RotaryPosition(
            indexer_dim, rotated=rotary_dim, pairs="halves", base=rope_base, scaling=scaling
        )
        return LightningIndexer(
            dim,
            query_latent_dim,
            heads=indexer_heads,
            head_dim=indexer_dim,
            count=indexed_tokens,
            position=index_position,
        )

    def layer(number: int) -> dict[str, Layer]:
        attention = LatentAttention(
            dim,
            heads,
            Causal(),
            latent_dim=latent_dim,
            query_latent_dim=query_latent_dim,
            head_dim=head_dim,
            rotary_dim=rotary_dim,
            value_dim=value_dim,
            position=position,
            scale=score_scale,
            norm_eps=LATENT_EPS,
            indexer=make_indexer(),
        )
        # what a token caches is its latent and one rotated key for all heads: latent_dim + rotary_dim numbers
        return {"attention": attention, "ff": feedforward(number)}

    norm = partial(RMSNorm, dim, norm_eps)
    return add_ahead_layers(
        rms_decoder(vocab, dim, depth, layer, dropout=dropout, norm_eps=norm_eps, tied=tied),
        layer,
        partial(complete_layer, order="pre", norm=norm, dropout=dropout),
        norm,
        depth=depth,
        std=init_std(dim),
        ahead=ahead,
        ahead_tokens=ahead_tokens,
        ahead_weight=ahead_weight,
    )
