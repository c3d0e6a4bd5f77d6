"""Random feature attention: softmax over unit vectors estimated by sines and cosines, with a decay gate."""

from typing import Annotated, Literal

from manyformer.base.errors import UserError
from manyformer.models import LanguageModel
from manyformer.models.tasks.language_modelling import LANGUAGE_MODELLING
from manyformer.nn.linear import ArcCosineFeatures, RandomFourierFeatures
from manyformer.nn.linear.linear_kernel import LinearKernel
from manyformer.nn.linear.memory_rules import GatedRule, SumRule
from manyformer.nn.masks import Causal
from manyformer.recipes.parts.baselines import NormOrder, attention_layers, language_model, sinusoidal_embedding
from manyformer.recipes.parts.keywords import FeatureCount, FeatureRedraw
from manyformer.recipes.parts.registry import recipe

FLOOR = 0.1
"""The minimum of the normalizing sums in all recurrence forms; the published code has three different rules.

With 0.001 a few tokens whose sums nearly vanish dominate the gradient: a toy task that reaches 1.50 nats after 200
steps reached 1.74."""


@recipe(
    "Random feature attention",
    paper="Peng et al. 2021, Random Feature Attention, arXiv:2103.02143",
    summary="Random Fourier features of unit vectors approximate softmax, with a learned gate that decays the memory.",
    task=LANGUAGE_MODELLING,
    family="linear",
    constant_state=True,
    cost="O(l features d + l d^2) per layer; O(features d + d^2) per generated token, at any length",
    reasons={
        "attention_dropout": "keys and values are summed before any weight exists",
        "convex_weights": "random cosine features have any sign",
    },
    tiny_keywords={"features": 64},
)
def rfa(
    vocab: int = 256,
    dim: int = 512,
    depth: int = 8,
    heads: int = 8,
    ff_dim: int | None = None,
    features: FeatureCount = 128,
    feature_kernel: Annotated[
        Literal["gaussian", "arccos"],
        "the kernel function that random features approximate: the Gaussian of softmax, or arccosine",
    ] = "gaussian",
    update_rule: Annotated[
        Literal["gated", "sum"], "how a token updates the recurrent memory: decayed and summed (gated), or summed (sum)"
    ] = "gated",
    redraw: FeatureRedraw = 1,
    dropout: float = 0.0,
    norm_order: NormOrder = "pre",
    carried_memory: Annotated[
        Literal["none", "detached"],
        "whether training carries the memory from row to row of contiguous data, detached, which needs redraw=null",
    ] = "none",
) -> LanguageModel:
    """RFA-Gate of section 3.2 by default; sinusoids, else as `transformer-lm`.

    `features` counts sines and cosines. Each head has its own directions, redrawn after every `redraw` training steps,
    where the published code chooses among 500 sets at each step. `carried_memory="detached"` is RFA-GATE-Stateful:
    each row begins with the memory of the previous one, without its gradient, on data with `packing: contiguous`."""
    if carried_memory == "detached" and redraw is not None:
        raise UserError(
            f"carried_memory needs redraw=null: a memory summed with other directions than those of the next {redraw} "
            "steps would be noise to them"
        )

    def make_kernel(number: int) -> LinearKernel:
        feature_class = RandomFourierFeatures if feature_kernel == "gaussian" else ArcCosineFeatures
        # gaussian: sines and cosines of random projections, whose products estimate a Gaussian of the distance
        feature_map = feature_class(dim // heads, features, heads=heads, redraw=redraw)
        return LinearKernel(
            feature_map,
            Causal(),
            # gated: a share of the memory is forgotten for what a token writes, so that recent tokens count more
            rule=GatedRule() if update_rule == "gated" else SumRule(),
            floor=FLOOR,
            carried=carried_memory == "detached",
        )

    embed = sinusoidal_embedding(vocab, dim, dropout=dropout)
    layer = attention_layers(dim, heads, ff_dim, make_kernel)
    return language_model(embed, depth, layer, dropout=dropout, norm_order=norm_order)
