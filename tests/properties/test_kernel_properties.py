"""Each measure of a kernel is right where the answer is known, in both directions."""

import math

import pytest
import torch

from manyformer.core import contiguous_positions
from manyformer.kernels import Kernel, KernelCall, SoftmaxKernel
from manyformer.kernels.pairwise_kernel import PairwiseKernel, ReluMeanWeights
from manyformer.masks import Causal
from manyformer.position import NoPosition
from manyformer.properties.kernel_properties import (
    antisymmetric_share,
    asymmetry,
    convex_hull_excess,
    dot_products,
    key_order_error,
    permutation_error,
    weights_are_convex,
)


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
