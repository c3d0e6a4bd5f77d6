"""Nadaraya-Watson regression on a noisy function of one variable, with two ways to choose the bandwidth."""

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from manyformer.nn.kernels.pairwise_kernel import (
    EpanechnikovScore,
    GaussianScore,
    LaplaceScore,
    ReluWeights,
    SoftmaxWeights,
    WeightFunction,
    leave_one_out,
    nadaraya_watson,
)

RegressionKernel = Literal["gaussian", "laplace", "epanechnikov"]
DistanceKernel = GaussianScore | LaplaceScore | EpanechnikovScore

KERNELS: dict[RegressionKernel, tuple[Callable[..., DistanceKernel], Callable[[], WeightFunction]]] = {
    "gaussian": (GaussianScore, SoftmaxWeights),
    "laplace": (LaplaceScore, SoftmaxWeights),
    "epanechnikov": (EpanechnikovScore, ReluWeights),
}
"""The score of a distance, and what makes weights of it."""

INTERVAL_END = 5.0
"""Points lie between 0 and here."""


class NoisySample(NamedTuple):
    """Points of a function with noise, in ascending order."""

    x: Float[Tensor, "n 1"]
    y: Float[Tensor, "n 1"]


class BandwidthChoice(NamedTuple):
    """A bandwidth, its leave-one-out error, and the error of its fit against the function without noise.

    Both errors are roots of mean squares, in the unit of y."""

    method: str
    bandwidth: float
    leave_one_out: float
    error: float


class KernelRegression(NamedTuple):
    """Regression of a sample: predictions are means of y, weighted by the distance of x over a bandwidth."""

    kernel: RegressionKernel
    sample: NoisySample

    def predict(self, bandwidth: float, query: Float[Tensor, "m 1"]) -> Float[Tensor, "m 1"]:
        """The predictions at the queries."""
        score, weights = self._parts(bandwidth, learned=False)
        return nadaraya_watson(*self.sample, query, kernel=score, weights=weights)

    def leave_one_out(self, bandwidth: float) -> float:
        """The root of the mean squared error of predicting each point from all others."""
        score, weights = self._parts(bandwidth, learned=False)
        return float(leave_one_out(*self.sample, kernel=score, weights=weights).sqrt())

    def judge(self, method: str, bandwidth: float) -> BandwidthChoice:
        """The errors of this bandwidth, on 200 points without noise for the second."""
        query = torch.linspace(0, INTERVAL_END, 200, dtype=torch.float64)[:, None]
        error = (self.predict(bandwidth, query) - textbook_function(query)).square().mean().sqrt()
        return BandwidthChoice(method, bandwidth, self.leave_one_out(bandwidth), float(error))

    def learn_bandwidth(self, *, begin: float = 1.0, steps: int = 300, lr: float = 0.05) -> float:
        """The bandwidth after gradient descent (Adam) on its logarithm, by the same error of points left out."""
        score, weights = self._parts(begin, learned=True)
        optimizer = torch.optim.Adam(score.parameters(), lr=lr)
        for _ in range(steps):
            optimizer.zero_grad()
            torch.autograd.backward(leave_one_out(*self.sample, kernel=score, weights=weights))
            optimizer.step()
        return score.bandwidth

    def search_bandwidth(self) -> float:
        """The bandwidth with the smallest leave-one-out error of `bandwidth_grid`."""
        return min(bandwidth_grid(), key=self.leave_one_out)

    def _parts(self, bandwidth: float, *, learned: bool) -> tuple[DistanceKernel, WeightFunction]:
        make_score, make_weights = KERNELS[self.kernel]
        return make_score(bandwidth, learned=learned).double(), make_weights()


def textbook_function(x: Float[Tensor, "n 1"]) -> Float[Tensor, "n 1"]:
    """2 sin(x) + x^0.8, the example of Zhang et al. 2023, Dive into Deep Learning, section 11.2."""
    return 2 * x.sin() + x**0.8


def noisy_sample(points: int, noise: float, seed: int) -> NoisySample:
    """`points` of the function at random places, with normal noise of the deviation `noise`."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(points, 1, generator=generator, dtype=torch.float64).sort(0).values * INTERVAL_END
    return NoisySample(x, textbook_function(x) + noise * torch.randn(points, 1, generator=generator, dtype=x.dtype))


def bandwidth_grid() -> list[float]:
    """Bandwidths from 0.02 to 5, each a twentieth larger than the one before."""
    return [0.02 * 1.05**power for power in range(114)]
