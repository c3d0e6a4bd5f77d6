"""Which kernels and which models have which properties, over all recipes."""

from typing import Any

import pytest
import torch
from torch import nn

import manyformer as mf
from manyformer.attention import Attention
from manyformer.attention.head_gates import attention_heads
from manyformer.check.tiny_models import build_tiny
from manyformer.core import Chain
from manyformer.kernels import SoftmaxKernel
from manyformer.models import ClassHead, MaskedLM, TextClassifier, TokenEmbedding
from manyformer.position import SinusoidalPosition
from manyformer.properties import attention_properties, permutation_change
from manyformer.recipes.compose import KERNELS
from manyformer.recipes.registry import task_of
from manyformer.residual import Residual

OUTSIDE = {
    # random cosine features have any sign
    "rfa",
    "rfa-gate",
    # the state is corrected, not averaged
    "delta",
    # a query whose rectified features are all zero gets zeros
    "cosine",
    # rectified scores may all be zero, and those that are not divided by their sum add up to anything
    "relu",
    "relu-squared",
    "relu-mean",
    "sigmoid",
}
"""The kernels of `compose` that leave the convex hull of their values; those of recipes are on their cards."""

TIED = {"LSHKernel", "RoutingKernel"}
"""The kernels whose queries are their keys."""

ORDERLESS = {"bert", "compose-images", "performer-encoder", "transformer-classifier", "vit", "relu-vit", "roformer"}
"""Encoders with layers without masks, whose positions are in the embedding or in queries and keys."""

MODELS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in mf.recipes()),
    *(("compose", {"kernel": kernel, "position": "none"}) for kernel in KERNELS),
]


def inputs_of(model: Any, length: int = 24) -> Any:
    task = task_of(model)
    tokens = torch.randint(5, 20, (2, task.fixed_length(model) or length), generator=torch.Generator().manual_seed(0))
    return task.example(model, tokens)


@pytest.mark.parametrize(("name", "keywords"), MODELS)
def test_every_kernel_has_the_properties_of_its_kind(name: str, keywords: dict[str, Any]) -> None:
    model = build_tiny(name, keywords, 0)
    layers = [layer for layer in attention_heads(model).values() if isinstance(layer, Attention)]
    properties = attention_properties(model, inputs_of(model))
    assert bool(properties) == bool(layers)
    is_outside = keywords["kernel"] in OUTSIDE if keywords else "convex_weights" in mf.recipes()[name].card.reasons
    if properties:
        assert all(layer.in_convex_hull for layer in properties) != is_outside
    for layer in properties:
        # two independent checks: weights that are a mean, and outputs in random directions
        assert not layer.convex_weights or max(layer.hull_excess) < 1e-9
        assert max(layer.rank) <= layer.rank_bound <= layer.head_dim
        assert min(layer.score_variance) > 0
        # a single pair is symmetric whatever its projections are
        if layer.rank_bound > 1 and layer.asymmetry is not None and layer.antisymmetric_share is not None:
            assert (max(layer.asymmetry) < 1e-9) == (layer.kernel in TIED)
            assert (max(layer.antisymmetric_share) < 1e-9) == (layer.kernel in TIED)
        if layer.permutation_error is not None and name in ORDERLESS:
            assert layer.permutation_error < 1e-9
    if properties and name not in ORDERLESS and layers[0].kernel.cache_mask is not None:
        mask = layers[0].kernel.cache_mask
        assert not mask.causal or (properties[0].permutation_error or 1.0) > 0.01


def encoder(position: nn.Module | None) -> list[Any]:
    torch.manual_seed(0)
    embed = TokenEmbedding(20, 8, position=position)  # type: ignore[arg-type]
    layers = {f"layer{n}": Residual(Attention(8, 2, SoftmaxKernel()), pre_norm=nn.LayerNorm(8)) for n in range(2)}
    return [embed, Chain(**layers)]


def test_a_model_without_positions_and_masks_is_equivariant() -> None:
    for position, is_equivariant in ((None, True), (SinusoidalPosition(8), False)):
        model: Any = MaskedLM(*encoder(position), ClassHead(8, 20))
        assert (permutation_change(model, inputs_of(model)) < 1e-9) is is_equivariant
        # pooling makes it invariant
        classifier: Any = TextClassifier(*encoder(position), ClassHead(8, 3))
        assert (permutation_change(classifier, inputs_of(classifier)) < 1e-9) is is_equivariant


@pytest.mark.parametrize("name", ["transformer-lm", "bert", "transformer-classifier", "roformer"])
def test_positions_and_masks_break_the_equivariance(name: str) -> None:
    model = build_tiny(name, {}, 0)
    assert permutation_change(model, inputs_of(model)) > 0.01
    # a mask is enough
    composed = build_tiny("compose", {"position": "none"}, 0)
    assert permutation_change(composed, inputs_of(composed)) > 0.01


def test_the_model_itself_stays_as_it_was() -> None:
    model = build_tiny("transformer-lm", {}, 0)
    attention_properties(model, inputs_of(model))
    assert model.training
    assert all(weight.dtype == torch.float32 for weight in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())
