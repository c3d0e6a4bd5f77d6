"""Nemotron-H: Mamba-2, feed-forward layers and a few of softmax attention, each a layer of its own."""

from collections.abc import Callable
from functools import partial
from typing import Annotated

from manyformer.base.errors import UserError
from manyformer.models import LanguageModel
from manyformer.models.tasks.language_modelling import LANGUAGE_MODELLING
from manyformer.nn.attention.attention import Attention
from manyformer.nn.core import Layer
from manyformer.nn.feed_forward import (
    FeedForwardExperts,
    MixtureOfExperts,
    SelectionBias,
    SequenceBalanceLoss,
    SigmoidRouter,
)
from manyformer.nn.feed_forward.feedforward import FeedForward, SquaredReLU
from manyformer.nn.masks import Causal
from manyformer.nn.softmax.softmax_kernel import SoftmaxKernel
from manyformer.recipes.parts.baselines import LayerMaker, head_width, makers_of_pattern, rms_decoder
from manyformer.recipes.parts.keywords import (
    BalanceBiasStep,
    BalanceWeight,
    ExpertCount,
    ExpertDim,
    ExpertsPerToken,
    ExpertWeightFactor,
    HeadDim,
    NormEps,
    SharedExpertDim,
    ShortConvolutionSize,
    StateSpaceGroups,
    StateSpaceHeadDim,
    StateSpaceHeads,
    StateSpaceKeyDim,
    TiedOutput,
)
from manyformer.recipes.parts.recurrent_layers import RecurrentSizes, state_space_attention
from manyformer.recipes.parts.registry import recipe


@recipe(
    "Nemotron-H",
    paper="NVIDIA 2025, Nemotron-H: A Family of Accurate and Efficient Hybrid Mamba-Transformer Models, "
    "arXiv:2504.03624; with experts, Nemotron 3 Nano, arXiv:2512.20848",
    summary="Mamba-2 and feed-forward layers in turn, and a few layers of softmax attention, without positions.",
    task=LANGUAGE_MODELLING,
    family="hybrid",
    cost="O(l^2 d) in the few layers of attention, O(l d^2) in the others",
    reasons={
        "attention_dropout": "layers of Mamba-2 form no weights of softmax",
        "convex_weights": "weights of Mamba-2 are products of any sign",
        "removable_heads": "one norm acts on the outputs of several heads",
        "bfloat16": "rounded inputs of a router may choose another expert",
    },
    tiny_keywords={
        "depth": 4,
        "kv_heads": 1,
        "pattern": "ME-F",
        "state_heads": 4,
        "state_head_dim": 6,
        "groups": 2,
        "state_dim": 5,
        "num_experts": 4,
        "experts_per_token": 2,
        "expert_dim": 16,
        "shared_expert_dim": 12,
    },
)
def nemotron_h(
    vocab: int = 32000,
    dim: int = 512,
    depth: int = 16,
    heads: int = 8,
    kv_heads: int | None = 2,
    head_dim: HeadDim = None,
    ff_dim: int | None = None,
    pattern: Annotated[
        str, "kinds of layers, repeated: M is Mamba-2, - feed-forward, F attends to all tokens, E has experts"
    ] = "M-M-M-F-",
    state_heads: StateSpaceHeads = 16,
    state_head_dim: StateSpaceHeadDim = 64,
    groups: StateSpaceGroups = 8,
    state_dim: StateSpaceKeyDim = 128,
    conv_size: ShortConvolutionSize = 4,
    num_experts: ExpertCount = 16,
    experts_per_token: ExpertsPerToken = 4,
    expert_dim: ExpertDim = 256,
    shared_expert_dim: SharedExpertDim = 512,
    expert_scale: ExpertWeightFactor = 1.0,
    bias_rate: BalanceBiasStep = 1e-3,
    balance_weight: BalanceWeight = 1e-4,
    *,
    norm_eps: NormEps = 1e-5,
    tied: TiedOutput = False,
    dropout: float = 0.0,
) -> LanguageModel:
    """Section 2, smaller than published: a layer is one branch, and 4 of the 52 layers of 8B attend.

    8B has dim=4096, heads=32, kv_heads=8, ff_dim=21504 and state_heads=128. Feed-forward layers have squared ReLU,
    `ff_dim` is 4 dim unless given; nothing has a bias but the convolutions. Experts (E) are those of Nemotron 3 Nano:
    also squared ReLU, chosen as in DeepSeek-V3, beside one of every token. Experts in a latent space are not built.
    Raises UserError for a pattern with other letters, and for heads and experts that do not fit."""
    width = head_width(dim, heads, head_dim)
    if state_heads % groups:
        raise UserError(f"state_heads ({state_heads}) must be a multiple of groups ({groups})")
    sizes = RecurrentSizes(dim, state_heads, state_dim, state_head_dim, groups)
    losses = [SequenceBalanceLoss(balance_weight)] if balance_weight else []

    def attention(number: int) -> Attention:
        # no positions: the layers of Mamba-2 know the order of tokens
        kernel = SoftmaxKernel(Causal())
        return Attention(dim, heads, kernel, kv_heads=kv_heads, head_dim=width, value_dim=width, bias=False)

    def experts(number: int) -> MixtureOfExperts:
        router = SigmoidRouter(
            dim,
            num_experts,
            experts_per_token,
            scale=expert_scale,
            selection_bias=SelectionBias(num_experts, bias_rate),
        )
        inner = FeedForwardExperts(num_experts, dim, expert_dim, activation=SquaredReLU())
        shared = FeedForward(dim, shared_expert_dim, activation=SquaredReLU(), bias=False)
        return MixtureOfExperts(router, inner, shared=shared, losses=losses)

    branches: dict[str, tuple[str, Callable[[int], Layer]]] = {
        "M": ("attention", lambda number: state_space_attention(sizes, conv_size=conv_size, norm_eps=norm_eps)),
        "F": ("attention", attention),
        "-": ("ff", lambda number: FeedForward(dim, ff_dim, activation=SquaredReLU(), bias=False)),
        "E": ("ff", experts),
    }

    def layer(number: int, letter: str) -> dict[str, Layer]:
        name, make = branches[letter]
        return {name: make(number)}

    makers: dict[str, LayerMaker] = {letter: partial(layer, letter=letter) for letter in branches}
    layers = makers_of_pattern(pattern, makers)
    return rms_decoder(vocab, dim, depth, layers, dropout=dropout, norm_eps=norm_eps, tied=tied)
