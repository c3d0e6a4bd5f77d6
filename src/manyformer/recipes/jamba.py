"""Jamba: seven layers of Mamba to one of softmax attention without positions, and experts in every second layer."""

from functools import partial
from typing import Annotated

from manyformer.base.errors import UserError
from manyformer.models import LanguageModel
from manyformer.models.tasks.language_modelling import LANGUAGE_MODELLING
from manyformer.nn.attention.attention import Attention
from manyformer.nn.core import Layer
from manyformer.nn.feed_forward import GatedExperts, LoadBalanceLoss, MixtureOfExperts, SoftmaxRouter
from manyformer.nn.feed_forward.feedforward import GatedFeedForward, default_gated_dim
from manyformer.nn.masks import Causal
from manyformer.nn.recurrent.mamba_mixer import MambaMixer, default_rank
from manyformer.nn.softmax.softmax_kernel import SoftmaxKernel
from manyformer.recipes.parts.baselines import LayerMaker, head_width, makers_of_pattern, rms_decoder
from manyformer.recipes.parts.keywords import (
    BalanceWeight,
    ChannelConvolutionSize,
    ChannelExpansion,
    ChannelMemorySize,
    ExpertCount,
    ExpertsPerToken,
    NormEps,
    PositiveSize,
    StepRank,
    TiedOutput,
)
from manyformer.recipes.parts.registry import recipe


@recipe(
    "Jamba",
    paper="Lieber et al. 2024, Jamba: A Hybrid Transformer-Mamba Language Model, arXiv:2403.19887",
    summary="One layer of softmax attention in eight, Mamba in the others, and experts in every second one.",
    task=LANGUAGE_MODELLING,
    family="hybrid",
    cost="O(l^2 d) in one layer of eight, O(l d^2) in the others, with the experts of a token alone",
    reasons={
        "bfloat16": "rounded inputs of a router may choose another expert",
    },
    tiny_keywords={"kv_heads": 1, "pattern": "mF", "state_dim": 4, "step_rank": 3, "num_experts": 4},
)
def jamba(
    vocab: int = 32000,
    dim: int = 512,
    depth: int = 8,
    heads: int = 8,
    kv_heads: int | None = 2,
    ff_dim: int | None = None,
    pattern: Annotated[
        str, "kinds of layers, repeated: m is Mamba, F attends to all tokens, without positions"
    ] = "mmmmFmmm",
    expert_every: Annotated[PositiveSize, "every so many layers one has experts, the last of them"] = 2,
    state_dim: ChannelMemorySize = 16,
    expansion: ChannelExpansion = 2,
    conv_size: ChannelConvolutionSize = 4,
    step_rank: StepRank = None,
    num_experts: ExpertCount = 16,
    experts_per_token: ExpertsPerToken = 2,
    balance_weight: BalanceWeight = 1e-3,
    *,
    norm_eps: NormEps = 1e-6,
    tied: TiedOutput = False,
    dropout: float = 0.0,
) -> LanguageModel:
    """Section 3, smaller than published: 52B has dim=4096, depth=32, heads=32, kv_heads=8 and ff_dim=14336.

    Mamba has norms of its step sizes, inputs and outputs of memories (section 6.4), which keep large models stable.
    `ff_dim` is the width of feed-forward layers and of each expert, 8/3 dim unless given; an expert's weight is its
    probability. Raises UserError for a pattern with other letters, and for experts that do not fit."""
    if experts_per_token > num_experts:
        raise UserError(f"experts_per_token ({experts_per_token}) must be at most num_experts ({num_experts})")
    width = head_width(dim, heads, None)
    rank = default_rank(dim) if step_rank is None else step_rank
    losses = [LoadBalanceLoss(balance_weight)] if balance_weight else []

    def mamba() -> Layer:
        return MambaMixer(dim, expansion * dim, state_dim=state_dim, rank=rank, conv_size=conv_size, norm_eps=norm_eps)

    def attention() -> Layer:
        # no positions: the layers of Mamba below know the order of tokens
        kernel = SoftmaxKernel(Causal())
        return Attention(dim, heads, kernel, kv_heads=kv_heads, head_dim=width, value_dim=width, bias=False)

    def feedforward(number: int) -> Layer:
        if number % expert_every != expert_every - 1:
            return GatedFeedForward(dim, ff_dim)
        router = SoftmaxRouter(dim, num_experts, experts_per_token, weighting="scores")
        return MixtureOfExperts(router, GatedExperts(num_experts, dim, ff_dim or default_gated_dim(dim)), losses=losses)

    def layer(number: int, *, is_full: bool) -> dict[str, Layer]:
        if is_full:
            return {"attention": attention(), "ff": feedforward(number)}
        return {"mixer": mamba(), "ff": feedforward(number)}

    makers: dict[str, LayerMaker] = {"m": partial(layer, is_full=False), "F": partial(layer, is_full=True)}
    layers = makers_of_pattern(pattern, makers)
    return rms_decoder(vocab, dim, depth, layers, dropout=dropout, norm_eps=norm_eps, tied=tied)
