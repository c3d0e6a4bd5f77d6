"""Attention sinks: the fused form is the definition, with gradients, and a sink of minus infinity is softmax."""

import pytest
import torch

from manyformer.nn import SoftmaxKernel
from manyformer.nn.core import contiguous_positions
from manyformer.nn.kernels.kernel import KernelCall
from manyformer.nn.masks import Causal, Mask, Window
from manyformer.nn.positions import NoPosition
from manyformer.nn.softmax.sink_softmax_kernel import SinkSoftmaxKernel, sink_attention, sink_attention_reference


@pytest.mark.parametrize("mask", [Causal(), Window(3)])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_the_fused_form_is_the_definition(mask: Mask, kv_heads: int) -> None:
    q, k, v = (torch.randn(2, heads, 11, 6, dtype=torch.double) for heads in (4, kv_heads, kv_heads))
    inputs = [x.requires_grad_() for x in (q, k, v, torch.randn(4, dtype=torch.double))]
    positions = contiguous_positions(2, 0, 11, q.device)
    visible = mask.dense(positions, positions, 4)
    direction = torch.randn(2, 4, 11, 6, dtype=torch.double)
    results = []
    for attend in (sink_attention, lambda *args, **options: sink_attention_reference(*args, **options)[0]):
        y = attend(*inputs, visible, scale=0.4)
        results.append([y, *torch.autograd.grad((y * direction).sum(), inputs)])
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


def kernel_call(length: int = 9) -> KernelCall:
    q, k, v = (torch.randn(2, heads, length, 8) for heads in (4, 2, 2))
    positions = contiguous_positions(2, 0, length, q.device)
    return KernelCall(q, k, v, positions, positions, NoPosition())


def test_a_sink_scales_softmax_by_a_sigmoid() -> None:
    """y = softmax output times sigmoid(logsumexp - sink); without a sink it is softmax."""
    call, kernel = kernel_call(), SinkSoftmaxKernel(4, Causal())
    plain = SoftmaxKernel(Causal())(call).y
    with torch.no_grad():
        kernel.sinks.copy_(torch.tensor([-3.0, 0.0, 1.0, 4.0]))
    scores = call.q @ call.k.repeat_interleave(2, 1).mT / 8**0.5
    lse = scores.masked_fill(~torch.ones(9, 9, dtype=torch.bool).tril(), -torch.inf).logsumexp(-1)
    expected = plain * (lse - kernel.sinks[:, None]).sigmoid()[..., None]
    torch.testing.assert_close(kernel(call).y, expected, rtol=0, atol=1e-6)
    watched: list[torch.Tensor] = []
    kernel(call._replace(watch=lambda module, name, value: watched.append(value)))
    assert (watched[0].sum(-1) < 1).all()
    with torch.no_grad():
        kernel.sinks.fill_(-1e9)
    torch.testing.assert_close(kernel(call).y, plain, rtol=0, atol=1e-6)
