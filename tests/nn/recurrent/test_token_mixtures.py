"""Mixtures of tokens and squared ReLU equal their formulas, with gradients, in blocks and at once."""

import pytest
import torch

from manyformer.nn.feed_forward.feedforward import squared_relu
from manyformer.nn.recurrent.rwkv_time_mixing import mix_tokens
from manyformer.nn.runtime import device_reads

WIDTH = 6


@pytest.mark.parametrize("elements", [1, 4 * WIDTH, 10_000])
@pytest.mark.parametrize("shares", [1, 3])
def test_mixtures_equal_their_formula_with_gradients(
    shares: int, elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_reads, "BLOCK_ELEMENTS", max(1, elements // torch.get_num_threads()))
    torch.manual_seed(0)
    x, other = (torch.randn(2, 7, WIDTH, dtype=torch.float64, requires_grad=True) for _ in range(2))
    share = torch.randn(shares, WIDTH, dtype=torch.float64, requires_grad=True)
    actual = torch.stack(list(mix_tokens(x, other, share)))
    expected = x + share[:, None, None] * (other - x)
    torch.testing.assert_close(actual, expected)
    upstream = torch.randn_like(expected)
    gradients = (torch.autograd.grad(y, [x, other, share], upstream) for y in (actual, expected))
    torch.testing.assert_close(*gradients)


def test_it_equals_the_composed_functions_with_gradients() -> None:
    torch.manual_seed(0)
    x, upstream = torch.randn(3, 50, dtype=torch.float64, requires_grad=True), torch.randn(3, 50, dtype=torch.float64)
    expected = x.relu().square()
    torch.testing.assert_close(squared_relu(x), expected, rtol=0, atol=0)
    grads = [torch.autograd.grad(y, x, upstream)[0] for y in (squared_relu(x), expected)]
    torch.testing.assert_close(*grads, rtol=0, atol=1e-15)
    assert torch.autograd.gradcheck(squared_relu, x)
