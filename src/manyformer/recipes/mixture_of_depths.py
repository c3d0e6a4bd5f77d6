"""Mixture-of-Depths: a language model in which half of the layers see an eighth of the tokens."""

from functools import partial
from typing import Annotated

from annotated_types import Gt, Le
from torch import nn

from manyformer.models import LanguageModel, TokenEmbedding
from manyformer.models.tasks.language_modelling import LANGUAGE_MODELLING
from manyformer.nn.attention.attention import Attention
from manyformer.nn.core import Chain, Layer
from manyformer.nn.depth.mixture_of_depths import DepthRouting, MixtureOfDepths
from manyformer.nn.feed_forward.feedforward import FeedForward
from manyformer.nn.masks import Causal
from manyformer.nn.positions import RotaryPosition
from manyformer.nn.softmax.softmax_kernel import SoftmaxKernel
from manyformer.recipes.parts.baselines import NormOrder, branch, check_heads, init_std, language_model
from manyformer.recipes.parts.registry import recipe


@recipe(
    "Mixture-of-Depths",
    paper="Raposo et al. 2024, Mixture-of-Depths: Dynamically Allocating Compute in Transformer-Based Language Models, "
    "arXiv:2404.02258",
    summary="Every second layer computes only the tokens that a router prefers; the others pass by.",
    task=LANGUAGE_MODELLING,
    family="depth",
    cost="O((1 + share^2) l^2 d + (1 + share) l d^2) per two layers",
    reasons={"causal-training": "in training a layer takes the best tokens of a whole document, so later ones compete"},
    tiny_keywords={"share": 0.5},
)
def mixture_of_depths(
    vocab: int = 256,
    dim: int = 512,
    depth: int = 8,
    heads: int = 8,
    ff_dim: int | None = None,
    share: Annotated[
        float, Gt(0), Le(1), "share of the tokens of a document that pass through every second layer"
    ] = 0.125,
    routing: Annotated[
        DepthRouting,
        "outside training the router's best tokens of a document (top-k, not causal), or those of a causal predictor",
    ] = "predictor",
    dropout: float = 0.0,
    norm_order: NormOrder = "pre",
) -> LanguageModel:
    """`transformer-lm` with rotary positions, whose second, fourth, ... layer has an eighth of the tokens. Section 3.

    What training sees, `manyformer check mixture-of-depths routing=top-k` shows: the choice of a token depends on later
    ones. The predictor that replaces it for generation learns the choice from single tokens (section 3.5)."""
    check_heads(dim, heads)
    position = RotaryPosition(dim // heads)
    norm = partial(nn.LayerNorm, dim)

    def layer(number: int) -> dict[str, Layer]:
        kernel = SoftmaxKernel(Causal())
        return {"attention": Attention(dim, heads, kernel, position=position), "ff": FeedForward(dim, ff_dim)}

    def routed_layer(number: int) -> Layer:
        parts = layer(number).items()
        # the router weighs the whole layer, so its branches are joined before it
        block = Chain(**{name: branch(part, order=norm_order, norm=norm, dropout=dropout) for name, part in parts})
        return MixtureOfDepths(block, dim, share=share, routing=routing)

    embed = TokenEmbedding(vocab, dim, std=init_std(dim), dropout=dropout)
    # full and routed layers in turn, which the paper finds better than routing in every layer
    return language_model(embed, depth, [layer, routed_layer], dropout=dropout, norm_order=norm_order)
