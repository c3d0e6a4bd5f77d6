"""Differential attention by its formula, and attention where nothing is subtracted."""

import math

import torch
import torch.nn.functional as F

from manyformer.nn import SoftmaxKernel
from manyformer.nn.core import contiguous_positions
from manyformer.nn.kernels.composed_kernels import DifferentialKernel
from manyformer.nn.kernels.kernel import KernelCall
from manyformer.nn.masks import Causal
from manyformer.nn.positions import NoPosition


def test_the_kernel_is_its_formula() -> None:
    q, k, v = (torch.randn(2, heads, 7, 6) for heads in (4, 4, 4))
    positions = contiguous_positions(2, 0, 7, q.device)
    call = KernelCall(q, k, v, positions, positions, NoPosition())
    kernel = DifferentialKernel(SoftmaxKernel(Causal()), 6, layer=3)
    lost = 0.8 - 0.6 * math.exp(-0.9)
    products = [(a @ b).item() for a, b in ((kernel.query_1, kernel.key_1), (kernel.query_2, kernel.key_2))]
    share = math.exp(products[0]) - math.exp(products[1]) + lost
    weights = (q @ k.mT / 6**0.5).masked_fill(~torch.ones(7, 7, dtype=torch.bool).tril(), -torch.inf).softmax(-1)
    outputs = []
    for first, second in ((0, 2), (1, 3)):
        values = torch.cat([v[:, first], v[:, second]], -1)
        difference = (weights[:, first] - share * weights[:, second]) @ values
        outputs.append((1 - lost) * F.rms_norm(difference, (12,), eps=1e-5))
    merged = kernel(call).y.transpose(1, 2).flatten(2)
    torch.testing.assert_close(merged, torch.cat(outputs, -1), rtol=0, atol=1e-5)
