"""Nadaraya-Watson regression: bandwidths by leaving points out and by gradient descent, against plain loops."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from manyformer.cli import run
from manyformer.nn.kernels.kernel_regression import KernelRegression, RegressionKernel, noisy_sample

NAMES: list[RegressionKernel] = ["gaussian", "laplace", "epanechnikov"]
WEIGHTS: dict[RegressionKernel, Callable[[float], float]] = {
    "gaussian": lambda u: 2.718281828459045 ** (-u * u / 2),
    "laplace": lambda u: 2.718281828459045 ** (-u),
    "epanechnikov": lambda u: max(0.0, 1 - u * u),
}


@pytest.mark.parametrize("kernel", NAMES)
def test_leaving_each_point_out_by_loops(kernel: RegressionKernel) -> None:
    sample = noisy_sample(12, 0.5, seed=1)
    points, errors, bandwidth = [(float(x), float(y)) for x, y in zip(*sample)], [], 2.0
    for x, y in points:
        weights = [WEIGHTS[kernel](abs(x - other) / bandwidth) for other, _ in points if other != x]
        mean = sum(w * v for w, (other, v) in zip(weights, [p for p in points if p[0] != x])) / sum(weights)
        errors.append((mean - y) ** 2)
    expected = (sum(errors) / len(errors)) ** 0.5
    assert KernelRegression(kernel, sample).leave_one_out(bandwidth) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("kernel", ["gaussian", "laplace"])
def test_gradient_descent_ends_where_the_search_ends(kernel: RegressionKernel) -> None:
    regression = KernelRegression(kernel, noisy_sample(50, 0.5, seed=0))
    assert regression.learn_bandwidth() == pytest.approx(regression.search_bandwidth(), rel=0.06)


@pytest.mark.parametrize("kernel", NAMES)
def test_the_chosen_bandwidth_is_better_than_one_far_from_it(kernel: RegressionKernel) -> None:
    """The error has the form of a U: too small repeats the noise, too large is a mean of everything."""
    ratios = torch.zeros(2)
    for seed in range(4):
        regression = KernelRegression(kernel, noisy_sample(50, 0.5, seed))
        best = regression.search_bandwidth()
        errors = [regression.judge("", bandwidth).error for bandwidth in (best / 10, best, best * 10)]
        ratios += torch.tensor([errors[0], errors[2]]) / errors[1] / 4
    assert (ratios > 1.3).all()


def test_the_command_writes_numbers_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["regress", "--points", "20", "--json", "--out", str(tmp_path / "fit.png")]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["method"] for row in rows] == ["small", "large", "leave-one-out", "learned"]
    assert min(row["leave_one_out"] for row in rows) < 0.9
    assert (tmp_path / "fit.png").stat().st_size > 10_000
    assert run(["regress", "--points", "20", "--out", str(tmp_path / "fit.txt")]) == 2
