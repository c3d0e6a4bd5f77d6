"""Mixtral: a decoder whose feed-forward layers are mixtures of experts."""

from manyformer.base.errors import UserError
from manyformer.models import LanguageModel
from manyformer.models.tasks.language_modelling import LANGUAGE_MODELLING
from manyformer.nn.attention.attention import Attention
from manyformer.nn.core import Layer
from manyformer.nn.feed_forward import (
    GatedExperts,
    LoadBalanceLoss,
    MixtureOfExperts,
    RouterZLoss,
    RoutingLoss,
    SoftmaxRouter,
)
from manyformer.nn.feed_forward.feedforward import default_gated_dim
from manyformer.nn.masks import Causal, Window
from manyformer.nn.positions import RotaryPosition
from manyformer.nn.softmax.softmax_kernel import SoftmaxKernel
from manyformer.recipes.parts.baselines import head_width, rms_decoder
from manyformer.recipes.parts.keywords import (
    BalanceWeight,
    CausalWindowOrNone,
    ExpertCount,
    ExpertsPerToken,
    HeadDim,
    NormEps,
    RopeBase,
    RouterZWeight,
    TiedOutput,
)
from manyformer.recipes.parts.registry import recipe


@recipe(
    "Mixtral",
    paper="Jiang et al. 2024, Mixtral of Experts, arXiv:2401.04088",
    summary="Mistral with eight feed-forward experts in each layer, of which a router chooses two for each token.",
    task=LANGUAGE_MODELLING,
    family="experts",
    cost="O(l^2 d + l d^2) per layer with the experts of a token alone",
    reasons={"bfloat16": "rounded inputs of a router may choose another expert"},
    tiny_keywords={"kv_heads": 1, "num_experts": 4},
)
def mixtral(
    vocab: int = 32000,
    dim: int = 512,
    depth: int = 8,
    heads: int = 8,
    kv_heads: int | None = None,
    head_dim: HeadDim = None,
    ff_dim: int | None = None,
    num_experts: ExpertCount = 8,
    experts_per_token: ExpertsPerToken = 2,
    window: CausalWindowOrNone = None,
    rope_base: RopeBase = 1e6,
    balance_weight: BalanceWeight = 0.01,
    router_z_weight: RouterZWeight = 0.0,
    *,
    norm_eps: NormEps = 1e-5,
    tied: TiedOutput = False,
    dropout: float = 0.0,
) -> LanguageModel:
    """Section 2, smaller than published: 8x7B has dim=4096, depth=32, heads=32, kv_heads=8, ff_dim=14336 (table 1).

    `ff_dim` is the width of one expert, 8/3 dim unless given. A token has the `experts_per_token` experts with the
    largest probabilities, whose weights sum to 1; no token is dropped. The paper names no loss of balance: ours is the
    Switch Transformer's, `balance_weight` per layer where the load is balanced. Raises UserError for experts per token
    that do not fit."""
    if not 2 <= experts_per_token <= num_experts:
        raise UserError(
            f"experts_per_token ({experts_per_token}) must be from 2 to num_experts ({num_experts}): the weights of a "
            "token sum to 1, so that with 1 expert the router would not learn"
        )
    width = head_width(dim, heads, head_dim)
    ff_width = default_gated_dim(dim) if ff_dim is None else ff_dim
    rotary = RotaryPosition(width, pairs="halves", base=rope_base)
    losses: list[RoutingLoss] = []
    if balance_weight:
        losses.append(LoadBalanceLoss(balance_weight))
    if router_z_weight:
        losses.append(RouterZLoss(router_z_weight))

    def layer(number: int) -> dict[str, Layer]:
        attention = Attention(
            dim,
            heads,
            SoftmaxKernel(Causal() if window is None else Window(window)),
            kv_heads=kv_heads,
            head_dim=width,
            value_dim=width,
            position=rotary,
            bias=False,
        )
        # the softmax is over the chosen experts, which is the same as renormalizing that over all
        router = SoftmaxRouter(dim, num_experts, experts_per_token)
        experts = GatedExperts(num_experts, dim, ff_width)
        return {"attention": attention, "ff": MixtureOfExperts(router, experts, losses=losses)}

    return rms_decoder(vocab, dim, depth, layer, dropout=dropout, norm_eps=norm_eps, tied=tied)
