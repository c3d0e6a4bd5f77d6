"""Squared ReLU: values and gradients of the composed functions."""

import torch

from manyformer.ops.token_mixtures import squared_relu


def test_it_equals_the_composed_functions_with_gradients() -> None:
    torch.manual_seed(0)
    x, upstream = torch.randn(3, 50, dtype=torch.float64, requires_grad=True), torch.randn(3, 50, dtype=torch.float64)
    expected = x.relu().square()
    torch.testing.assert_close(squared_relu(x), expected, rtol=0, atol=0)
    grads = [torch.autograd.grad(y, x, upstream)[0] for y in (squared_relu(x), expected)]
    torch.testing.assert_close(*grads, rtol=0, atol=1e-15)
    assert torch.autograd.gradcheck(squared_relu, x)
