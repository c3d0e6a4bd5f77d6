"""Dropout: shares, scale, gradients, reproducibility."""

import pytest
import torch

from manyformer.nn.runtime.dropout import Dropout, drop


@pytest.mark.parametrize("p", [0.05, 0.3, 0.5, 0.97])
def test_the_share_is_right_and_the_mean_is_kept(p):
    torch.manual_seed(0)
    n = 1_000_003
    y = drop(torch.ones(n), p)
    kept = y != 0
    assert y[kept].unique().numel() == 1
    torch.testing.assert_close(y[kept][0].item(), 1 / (1 - p), rtol=1e-3, atol=0)
    # four standard deviations of a binomial share
    assert abs(kept.float().mean().item() - (1 - p)) < 4 * (p * (1 - p) / n) ** 0.5 + 2**-17


def test_values_that_share_a_draw_are_independent():
    torch.manual_seed(0)
    kept = (drop(torch.ones(400_000), 0.5) != 0).view(-1, 4).float()
    assert (torch.corrcoef(kept.T) - torch.eye(4)).abs().max() < 0.015


def test_the_gradient_is_that_of_the_kept_values():
    x = torch.randn(3, 5, 7, requires_grad=True)
    y = drop(x, 0.4)
    (grad,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(grad * x, y)


def test_a_seed_repeats_it_and_evaluation_leaves_it_out():
    layer, x = Dropout(0.5), torch.randn(10, 3)
    torch.manual_seed(1)
    first = layer(x)
    torch.manual_seed(1)
    assert torch.equal(layer(x), first)
    assert not torch.equal(layer(x), first)
    assert layer.eval()(x) is x
    assert Dropout(0.0)(x) is x
