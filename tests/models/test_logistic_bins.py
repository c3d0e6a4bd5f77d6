"""Logistic distributions cut into bins, against torch's distributions and against many digits."""

import math

import mpmath
import pytest
import torch
from torch import Tensor
from torch.distributions import AffineTransform, SigmoidTransform, TransformedDistribution, Uniform

from manyformer.models.head import log_level, log_levels

WIDE: dict[str, torch.dtype] = {"dtype": torch.float64}


def drawn(levels: int) -> tuple[Tensor, Tensor, Tensor]:
    """Means, some beyond the ends, log-scales and levels."""
    torch.manual_seed(levels)
    mean, log_scale = 1.5 * torch.randn(6, 5, 3, **WIDE), torch.empty(6, 5, 3, **WIDE).uniform_(-4, 1)
    return mean, log_scale, torch.randint(levels, (6, 5))


@pytest.mark.parametrize("levels", [2, 3, 16, 256])
def test_bins_are_differences_of_the_cumulative_distribution(levels: int) -> None:
    mean, log_scale, level = drawn(levels)
    base = Uniform(torch.zeros((), **WIDE), torch.ones((), **WIDE), validate_args=False)
    logistic = TransformedDistribution(
        base, [SigmoidTransform().inv, AffineTransform(mean, log_scale.exp())], validate_args=False
    )
    edges = (2 * torch.arange(levels, **WIDE)[:-1] + 1) / (levels - 1) - 1
    below = torch.stack([logistic.cdf(edge) for edge in edges], -1)
    expected = torch.diff(torch.cat([torch.zeros_like(mean)[..., None], below, torch.ones_like(mean)[..., None]], -1))
    actual = log_levels(mean, log_scale, levels)
    torch.testing.assert_close(actual.exp(), expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(actual.logsumexp(-1), torch.zeros_like(mean), rtol=0, atol=1e-12)
    one = log_level(mean, log_scale, level, levels)
    torch.testing.assert_close(one, actual.gather(-1, level[..., None, None].expand(-1, -1, 3, 1))[..., 0])


@pytest.mark.parametrize(("mean", "log_scale"), [(-1.0, -7.0), (0.3, -6.0), (1.0, -7.0), (0.0, 4.0), (40.0, -2.0)])
def test_far_from_the_mean(mean: float, log_scale: float) -> None:
    """Where a difference of two numbers near 1, or near 0, would be nothing."""
    numbers = range(0, 256, 5)
    with mpmath.workdps(1500):
        width = mpmath.exp(log_scale)
        edges = [(mpmath.mpf(2 * edge + 1) / 255 - 1 - mpmath.mpf(mean)) / width for edge in range(255)]
        below = [mpmath.mpf(0), *(1 / (1 + mpmath.exp(-edge)) for edge in edges), mpmath.mpf(1)]
        expected = torch.tensor([float(mpmath.log(below[n + 1] - below[n])) for n in numbers], **WIDE)
    for dtype in (torch.float64, torch.float32):
        centre, scale = torch.tensor([mean], dtype=dtype), torch.tensor([log_scale], dtype=dtype)
        # a mean is as exact as its type, and a distribution magnifies that by how narrow it is
        near = {"rtol": 1e-6 if dtype == torch.float32 else 1e-12}
        near["atol"] = max(1.0, abs(mean)) * torch.finfo(dtype).eps * 4 * math.exp(-log_scale) + near["rtol"]
        actual = log_levels(centre, scale, 256)[0, ::5].double()
        torch.testing.assert_close(actual, expected, **near)
        single = torch.cat([log_level(centre, scale, torch.tensor(n), 256) for n in numbers]).double()
        torch.testing.assert_close(single, expected, **near)


@pytest.mark.parametrize("levels", [2, 7])
def test_gradients(levels: int) -> None:
    mean, log_scale, level = drawn(levels)
    inputs = (mean[:2].requires_grad_(), log_scale[:2].requires_grad_())
    assert torch.autograd.gradcheck(lambda m, s: log_levels(m, s, levels), inputs)
    assert torch.autograd.gradcheck(lambda m, s: log_level(m, s, level[:2], levels), inputs)
    for centre in (-50.0, 50.0):
        far = torch.tensor([centre, -7.0]).requires_grad_()
        log_levels(far[:1], far[1:], levels).sum().backward()
        assert torch.isfinite(far.grad).all()  # type: ignore[arg-type]
