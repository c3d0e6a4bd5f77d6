"""gpt-oss: windows and full attention in turn, with a learned logit beside the scores, and experts."""

from functools import partial
from typing import Annotated

from manyformer.base.errors import UserError
from manyformer.models import LanguageModel
from manyformer.models.tasks.language_modelling import LANGUAGE_MODELLING
from manyformer.nn.attention.attention import Attention
from manyformer.nn.core import Layer
from manyformer.nn.feed_forward import ClampedSwiGLU, GatedExperts, LoadBalanceLoss, MixtureOfExperts, SoftmaxRouter
from manyformer.nn.feed_forward.feedforward import default_gated_dim
from manyformer.nn.masks import Causal, Mask, Window
from manyformer.nn.positions import RotaryPosition, YaRNRotaryScaling
from manyformer.nn.softmax.sink_softmax_kernel import SinkSoftmaxKernel
from manyformer.recipes.parts.baselines import head_width, makers_of_pattern, rms_decoder
from manyformer.recipes.parts.keywords import (
    BalanceWeight,
    CausalWindowSize,
    ExpertCount,
    ExpertsPerToken,
    HeadDim,
    NormEps,
    RopeBase,
    TiedOutput,
    UnscaledLength,
    YarnFactor,
)
from manyformer.recipes.parts.registry import recipe


@recipe(
    "gpt-oss",
    paper="OpenAI 2025, gpt-oss-120b and gpt-oss-20b Model Card, arXiv:2508.10925",
    summary="Windows and full attention in turn with learned sinks, and experts with a clamped gate.",
    task=LANGUAGE_MODELLING,
    family="experts",
    cost="O(l^2 d + l d^2) per layer with the experts of a token alone; windows cache w tokens",
    reasons={
        "bfloat16": "rounded inputs of a router may choose another expert",
        "attention_dropout": "a learned logit beside the scores takes a share of the weights",
        "convex_weights": "weights add up to less than 1",
    },
    tiny_keywords={"kv_heads": 1, "window": 5, "num_experts": 4, "experts_per_token": 2, "original_length": 16},
)
def gpt_oss(
    vocab: int = 32000,
    dim: int = 512,
    depth: int = 8,
    heads: int = 8,
    kv_heads: int | None = 1,
    head_dim: HeadDim = None,
    ff_dim: int | None = None,
    num_experts: ExpertCount = 8,
    experts_per_token: ExpertsPerToken = 4,
    window: CausalWindowSize = 128,
    pattern: Annotated[str, "kinds of layers, repeated: W has a window, F attends to all tokens"] = "WF",
    rope_base: RopeBase = 150_000.0,
    rope_factor: YarnFactor = 32.0,
    original_length: UnscaledLength = 4096,
    balance_weight: BalanceWeight = 1e-3,
    *,
    norm_eps: NormEps = 1e-5,
    tied: TiedOutput = False,
    dropout: float = 0.0,
) -> LanguageModel:
    """Section 2, smaller than published: 20b has dim=2880, depth=24, heads=64, kv_heads=8, head_dim=64, ff_dim=2880.

    Its num_experts=32 are 128 in 120b, which has depth=36. `ff_dim` is the width of one expert, 8/3 dim unless given.
    All projections but those of the embedding and the output have biases. Weights are not quantized, as released ones
    are. Raises UserError for a pattern with other letters and experts per token that do not fit."""
    if not 2 <= experts_per_token <= num_experts:
        raise UserError(f"experts_per_token ({experts_per_token}) must be from 2 to num_experts ({num_experts})")
    width = head_width(dim, heads, head_dim)
    ff_width = default_gated_dim(dim) if ff_dim is None else ff_dim
    scaling = None
    if rope_factor > 1:
        # the released code does not round the pairs between which YaRN interpolates
        scaling = YaRNRotaryScaling(rope_factor, original_length, ramp="unrounded-pairs")
    rotary = RotaryPosition(width, pairs="halves", base=rope_base, scaling=scaling)
    losses: list[LoadBalanceLoss] = []
    if balance_weight:
        losses.append(LoadBalanceLoss(balance_weight))

    def layer(number: int, mask: Mask) -> dict[str, Layer]:
        attention = Attention(
            dim,
            heads,
            # a learned logit of each head joins the softmax without a value, so that a head may attend to nothing
            SinkSoftmaxKernel(heads, mask),
            kv_heads=kv_heads,
            head_dim=width,
            value_dim=width,
            position=rotary,
        )
        router = SoftmaxRouter(dim, num_experts, experts_per_token, bias=True)
        experts = GatedExperts(num_experts, dim, ff_width, unit=ClampedSwiGLU(), bias=True)
        return {"attention": attention, "ff": MixtureOfExperts(router, experts, losses=losses)}

    makers = {"W": partial(layer, mask=Window(window)), "F": partial(layer, mask=Causal())}
    layers = makers_of_pattern(pattern, makers)
    return rms_decoder(vocab, dim, depth, layers, dropout=dropout, norm_eps=norm_eps, tied=tied)
