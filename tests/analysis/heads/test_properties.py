"""Which kernels and which models have which properties; each measure is right where the answer is known."""

import math
from typing import Any

import pytest
import torch
from torch import nn

import manyformer as mf
from manyformer.analysis.heads.properties import (
    antisymmetric_share,
    asymmetry,
    attention_properties,
    convex_hull_excess,
    dot_products,
    key_order_error,
    permutation_change,
    permutation_error,
    weights_are_convex,
)
from manyformer.analysis.own_models import build_tiny
from manyformer.models import ClassHead, MaskedLM, TextClassifier, TokenEmbedding
from manyformer.nn import Attention, Kernel, KernelCall, SoftmaxKernel
from manyformer.nn.attention.head_gates import attention_heads
from manyformer.nn.core import Chain, contiguous_positions
from manyformer.nn.kernels.pairwise_kernel import PairwiseKernel, ReluMeanWeights
from manyformer.nn.masks import Causal
from manyformer.nn.positions import NoPosition, SinusoidalPosition
from manyformer.nn.residual import Residual
from manyformer.recipes.compose import KERNELS
from manyformer.recipes.parts.registry import task_of

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
    "softpick",
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


@pytest.mark.thinned(2)
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


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=generator(seed), dtype=torch.float64)


def make_call(length: int = 6, width: int = 4) -> KernelCall:
    positions = contiguous_positions(2, 0, length, torch.device("cpu"))
    q, k, v = (randn(2, 3, length, width, seed=seed) for seed in range(3))
    return KernelCall(q, k, v, positions, positions, NoPosition())


def test_weighted_means_lie_in_the_hull_and_other_sums_do_not() -> None:
    v = randn(2, 3, 6, 4)
    weights = randn(2, 3, 5, 6, seed=1).softmax(-1)
    assert convex_hull_excess(v, weights @ v, generator(), causal=False).max() <= 1e-12
    # the vertices are in the hull, a point beyond one of them is not
    assert convex_hull_excess(v, v, generator(), causal=False).max() <= 1e-12
    outside = convex_hull_excess(v, v * torch.tensor([1.0, 1.5, 0.5]).view(3, 1, 1), generator(), causal=False)
    assert outside[0] <= 1e-12
    assert outside[1] > 0.1
    # of earlier values alone the mean of all is not made
    assert convex_hull_excess(v, v.mean(2, keepdim=True).expand_as(v), generator(), causal=True).max() > 0.1
    averages = v.cumsum(2) / torch.arange(1, 7).view(6, 1)
    assert convex_hull_excess(v, averages, generator(), causal=True).max() <= 1e-12


def test_heads_that_share_values_are_compared_with_them() -> None:
    v = randn(1, 1, 5, 3)
    assert convex_hull_excess(v, v.expand(1, 2, 5, 3), generator(), causal=False).max() <= 1e-12


def test_weights_are_a_proof_only_if_they_are_a_mean() -> None:
    call = make_call()
    kernel = SoftmaxKernel()
    y = kernel(call).y
    assert weights_are_convex(kernel, call, y) is True
    # they are none of other outputs
    assert weights_are_convex(kernel, call, 1.1 * y) is None
    rectified = PairwiseKernel(weights=ReluMeanWeights())
    y = rectified(call).y
    assert weights_are_convex(rectified, call, y) is False
    # means of few values may lie in the hull of many, multiples of them do not
    assert convex_hull_excess(call.v, 9 * y, generator(), causal=False).max() > 0.1


@pytest.mark.parametrize(("kernel", "is_equivariant"), [(SoftmaxKernel(), True), (SoftmaxKernel(Causal()), False)])
def test_a_mask_breaks_the_symmetries(kernel: Kernel, is_equivariant: bool) -> None:
    call = make_call()
    y, order = kernel(call).y, torch.tensor([3, 0, 5, 1, 4, 2])
    for error in (permutation_error(kernel, call, order, y), key_order_error(kernel, call, order, y)):
        assert (error <= 1e-12) is is_equivariant
        assert is_equivariant or error > 0.1


def test_asymmetry_is_zero_for_shared_queries_and_sqrt_2_for_independent_scores() -> None:
    k = randn(1, 2, 200, 8)
    assert asymmetry(dot_products(k, k)).max() <= 1e-12
    torch.testing.assert_close(asymmetry(randn(1, 2, 400, 400)).mean().item(), math.sqrt(2), rtol=0.01, atol=0)
    antisymmetric = randn(1, 1, 5, 5) - randn(1, 1, 5, 5).mT
    assert asymmetry(antisymmetric).tolist() == pytest.approx([2])
    # even symmetric scores give asymmetric weights: the softmax normalizes rows
    assert asymmetry(dot_products(k, k).softmax(-1)).min() > 0.1


def test_the_antisymmetric_share_of_a_product() -> None:
    weight = randn(1, 4, 6)
    assert antisymmetric_share(weight, weight).max() <= 1e-12
    rotation = torch.tensor([[[0.0, 1.0], [-1.0, 0.0]]], dtype=torch.float64)
    assert antisymmetric_share(rotation, torch.eye(2, dtype=torch.float64)[None]).tolist() == pytest.approx([1])


def test_scores_have_the_rank_and_the_variance_of_the_head_dimension() -> None:
    q, k = randn(1, 1, 500, 16), randn(1, 1, 500, 16, seed=1)
    scores = dot_products(q, k)
    assert torch.linalg.matrix_rank(scores[0, 0]) == 16
    # the variance, not the deviation
    assert scores.var().item() == pytest.approx(16, rel=0.1)
    # the softmax is of full rank
    assert torch.linalg.matrix_rank((scores[0, 0] / 4).softmax(-1)) > 100
