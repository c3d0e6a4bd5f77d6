"""Scores and weights beyond softmax of a product: closed forms, masks, and regression as attention."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from layouts import LAYOUTS, LENGTH, ROWS, apart, differentiated, place_of, real_of, tensors
from manyformer.nn import Attention, KernelCall, PairwiseKernel, SoftmaxKernel
from manyformer.nn.core import Context
from manyformer.nn.kernels.pairwise_kernel import (
    AdditiveScore,
    BilinearScore,
    CosineScore,
    DotProductScore,
    EpanechnikovScore,
    GaussianScore,
    LaplaceScore,
    PairScore,
    ReluMeanWeights,
    ReluWeights,
    SigmoidWeights,
    SoftmaxWeights,
    SoftpickWeights,
    WeightFunction,
    leave_one_out,
    nadaraya_watson,
)
from manyformer.nn.masks import AllKeys, Causal
from manyformer.nn.positions import NoPosition

HEADS, GROUPS, KEY, VALUE = 4, 2, 6, 5
NOWHERE = NoPosition()

SCORES: dict[str, Any] = {
    "product": DotProductScore,
    "angle": CosineScore,
    "bilinear": lambda: BilinearScore(KEY, heads=HEADS),
    "additive": lambda: AdditiveScore(KEY, 7),
    "Gaussian": lambda: GaussianScore(1.5),
    "Laplace": lambda: LaplaceScore(1.5),
    "Epanechnikov": lambda: EpanechnikovScore(4.0),
}
WEIGHTS: dict[str, Any] = {
    "softmax": SoftmaxWeights,
    "relu": ReluWeights,
    "relu squared": lambda: ReluWeights(power=2),
    "relu mean": ReluMeanWeights,
    "sigmoid": SigmoidWeights,
    "softpick": SoftpickWeights,
}


def score_by_hand(score: PairScore, q: Tensor, k: Tensor, head: int) -> Tensor:
    if isinstance(score, DotProductScore):
        return q @ k / math.sqrt(len(q))
    if isinstance(score, CosineScore):
        return q @ k / (q.norm() * k.norm()) / score.log.exp()
    if isinstance(score, BilinearScore):
        return q @ score.weight[head] @ k
    if isinstance(score, AdditiveScore):
        return score.energy.weight[0] @ (score.query.weight @ q + score.key.weight @ k).tanh()
    assert isinstance(score, GaussianScore | LaplaceScore | EpanechnikovScore)
    u = (q - k).norm() / score.log.exp()
    return -(u**2) / 2 if isinstance(score, GaussianScore) else -u if isinstance(score, LaplaceScore) else 1 - u**2


def weights_by_hand(weights: WeightFunction, scores: Tensor) -> Tensor:
    if isinstance(weights, SoftmaxWeights):
        return scores.softmax(0)
    if isinstance(weights, SigmoidWeights):
        return 1 / (1 + len(scores) * (-scores).exp())
    if isinstance(weights, SoftpickWeights):
        return (scores.exp() - 1).clamp(min=0) / (scores.exp() - 1).abs().sum()
    if isinstance(weights, ReluMeanWeights):
        return scores.clamp(min=0) / len(scores)
    assert isinstance(weights, ReluWeights)
    powers = scores.clamp(min=0) ** weights.power
    return powers / powers.sum().clamp(min=weights.floor)


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("score", SCORES)
def test_one_query_at_a_time(score: str, weights: str) -> None:
    place, real = place_of("packed"), real_of("packed")
    kernel = PairwiseKernel(SCORES[score](), WEIGHTS[weights](), Causal()).double()
    q, k, v = tensors(HEADS, GROUPS, KEY, VALUE)
    y = kernel(KernelCall(q, k, v, place, place, NOWHERE)).y
    seen = Causal().dense(place, place, 1)
    for b, h, i in [(0, 0, 0), (0, 1, 4), (0, 3, 12), (1, 2, 9), (1, 1, 22)]:
        keys = seen[b, 0, i].nonzero()[:, 0].tolist()
        assert real[b, 0, i]
        scores = torch.stack([score_by_hand(kernel.score, q[b, h, i], k[b, h // 2, j], h) for j in keys])
        expected = weights_by_hand(kernel.weights, scores) @ v[b, h // 2, keys]
        torch.testing.assert_close(y[b, h, i], expected, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("score", ["Gaussian", "Laplace", "Epanechnikov"])
def test_scores_of_distances_have_the_gradients_of_their_definition(score: str) -> None:
    q, k, _ = (x.detach().requires_grad_() for x in tensors(HEADS, HEADS, KEY, VALUE))
    scorer = SCORES[score]().double()
    pairs = [(0, 0, 3, 3), (1, 2, 0, 6), (1, 3, 9, 2)]
    actual = torch.stack([scorer(q, k)[pair] for pair in pairs]).sum()
    by_hand = sum(score_by_hand(scorer, q[b, h, i], k[b, h, j], h) for b, h, i, j in pairs)
    inputs = (q, k, scorer.log)
    for gradient, expected in zip(torch.autograd.grad(actual, inputs), torch.autograd.grad(by_hand, inputs)):
        torch.testing.assert_close(gradient, expected, atol=1e-12, rtol=1e-12)
    # equal queries and keys have no direction
    (gradient,) = torch.autograd.grad(scorer(q, q.detach()).diagonal(dim1=-2, dim2=-1).sum(), q)
    assert not gradient.any()
    narrow = SCORES[score]()(q.bfloat16(), k.bfloat16())
    assert narrow.dtype == torch.bfloat16
    torch.testing.assert_close(narrow.double(), scorer(q, k), atol=0.05, rtol=0.05)


@pytest.mark.parametrize("mask", [Causal(), AllKeys()], ids=repr)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_usual_ones_are_softmax_attention(layout: str, mask: Any) -> None:
    place, real = place_of(layout), real_of(layout)
    qkv = tensors(HEADS, GROUPS, KEY, VALUE)
    grad_output = torch.randn(ROWS, HEADS, LENGTH, VALUE, dtype=torch.float64) * real
    actual, expected = (
        differentiated(kernel(KernelCall(*qkv, place, place, NOWHERE)).y * real, grad_output, qkv)
        for kernel in (PairwiseKernel(mask=mask), SoftmaxKernel(mask))
    )
    assert apart(actual, expected) < 1e-10


def test_a_gaussian_of_keys_of_one_length_is_the_scaled_product() -> None:
    place = place_of("plain")
    q, k, v = (x.detach() for x in tensors(HEADS, GROUPS, KEY, VALUE))
    k = k / k.norm(dim=-1, keepdim=True)
    gaussian = PairwiseKernel(GaussianScore(KEY**0.25)).double()
    torch.testing.assert_close(
        gaussian(KernelCall(q, k, v, place, place, NOWHERE)).y,
        PairwiseKernel()(KernelCall(q, k, v, place, place, NOWHERE)).y,
    )


def test_softpick_of_far_scores_is_finite_and_of_negative_ones_nothing() -> None:
    visible = torch.ones(1, 3, dtype=torch.bool)
    scores = torch.tensor([[-200.0, -150.0, -120.0]], requires_grad=True)
    weights = SoftpickWeights()(scores, visible)
    assert not weights.any()
    weights.sum().backward()
    assert scores.grad is not None
    assert scores.grad.isfinite().all()
    large = SoftpickWeights()(torch.tensor([[200.0, 199.0, -200.0]]), visible)
    # 1 and 1 / e over their sum: what is subtracted is far below rounding
    expected = torch.tensor([[1.0, math.exp(-1), 0.0]]) / (1 + math.exp(-1))
    torch.testing.assert_close(large, expected)
    small = SoftpickWeights()(torch.tensor([[1e-6, 3e-6, -2e-6]]), visible)
    torch.testing.assert_close(small, torch.tensor([[1 / 6, 1 / 2, 0.0]]), atol=1e-5, rtol=0)
    all_zero = torch.zeros(1, 3, requires_grad=True)
    SoftpickWeights()(all_zero, visible).sum().backward()
    assert all_zero.grad is not None
    assert all_zero.grad.isfinite().all()


@pytest.mark.parametrize("weights", WEIGHTS)
def test_rows_that_see_nothing_are_zero_with_finite_gradients(weights: str) -> None:
    place = place_of("nothing but padding")
    qkv = tensors(HEADS, GROUPS, KEY, VALUE)
    y, *gradients = differentiated(
        PairwiseKernel(None, WEIGHTS[weights](), Causal())(KernelCall(*qkv, place, place, NOWHERE)).y,
        torch.ones((), dtype=torch.float64),
        qkv,
    )
    assert (y[0] == 0).all()
    assert (y[1] != 0).any()
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_all_parameters_learn_inside_attention() -> None:
    for make in SCORES.values():
        layer = Attention(HEADS * KEY, HEADS, PairwiseKernel(make()))
        layer(torch.randn(ROWS, LENGTH, HEADS * KEY), Context(place_of("packed"))).y.square().sum().backward()
        gradients = [parameter.grad for parameter in layer.kernel.parameters()]
        assert all(gradient is not None and 0 < gradient.norm() < torch.inf for gradient in gradients)


class TestRegression:
    """A noisy sine: 50 points in (0, 5), told from 80 between 0.5 and 4.5."""

    @staticmethod
    def points(noise: float) -> tuple[Tensor, Tensor, Tensor]:
        x = 5 * torch.rand(50, 1, dtype=torch.float64)
        return x, x.sin() + noise * torch.randn_like(x), torch.linspace(0.5, 4.5, 80, dtype=torch.float64)[:, None]

    def error(self, bandwidth: float, x: Tensor, y: Tensor, query: Tensor) -> float:
        kernel = GaussianScore(bandwidth, learned=False).double()
        return float((nadaraya_watson(x, y, query, kernel=kernel) - query.sin()).square().mean().sqrt())

    def test_the_bandwidth_is_neither_too_narrow_nor_too_wide(self) -> None:
        errors = {0.02: 0.0, 0.3: 0.0, 2.0: 0.0}
        for _ in range(10):
            points = self.points(0.2)
            for bandwidth in errors:
                errors[bandwidth] += self.error(bandwidth, *points) / 10
        assert errors[0.3] <= 0.15
        assert min(errors[0.02], errors[2.0]) >= 1.5 * errors[0.3]

    def test_the_limits(self) -> None:
        x, y, query = self.points(0.2)
        narrow = nadaraya_watson(x, y, query, kernel=GaussianScore(1e-4).double())
        nearest = y[(query - x.T).abs().argmin(1)]
        torch.testing.assert_close(narrow.detach(), nearest, atol=1e-4, rtol=0)
        wide = nadaraya_watson(x, y, query, kernel=GaussianScore(1e4).double())
        torch.testing.assert_close(wide.detach(), y.mean().expand_as(query), atol=1e-4, rtol=0)

    def test_a_bandwidth_is_learned_by_leaving_one_out(self) -> None:
        x, y, query = self.points(0.2)
        kernel = GaussianScore(2.0).double()
        optimiser = torch.optim.Adam(kernel.parameters(), lr=0.05)
        for _ in range(150):
            optimiser.zero_grad()
            leave_one_out(x, y, kernel=kernel).backward()
            optimiser.step()
        assert 0.1 <= kernel.bandwidth <= 0.8
        assert self.error(kernel.bandwidth, x, y, query) <= 0.15

    def test_it_is_the_formula(self) -> None:
        x, y, query = self.points(0.2)
        near = (-((query - x.T) ** 2) / (2 * 0.3**2)).exp()
        expected = near @ y / near.sum(1, keepdim=True)
        torch.testing.assert_close(
            nadaraya_watson(x, y, query, kernel=GaussianScore(0.3, learned=False).double()), expected
        )
        near = (1 - ((query - x.T) / 0.5) ** 2).clamp(min=0)
        ended = nadaraya_watson(
            x, y, query, kernel=EpanechnikovScore(0.5, learned=False).double(), weights=ReluWeights()
        )
        torch.testing.assert_close(ended, near @ y / near.sum(1, keepdim=True).clamp(min=1e-6))
        assert (
            nadaraya_watson(x, y, query + 50, kernel=EpanechnikovScore(0.5).double(), weights=ReluWeights()) == 0
        ).all()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GaussianScore(0.0), r"bandwidth \(0.0\) must be above 0"),
        (lambda: CosineScore(temperature=-1.0), r"temperature \(-1.0\) must be above 0"),
        (lambda: ReluWeights(power=0), r"power \(0\) must be at least 1"),
    ],
)
def test_mistakes_get_a_sentence(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
