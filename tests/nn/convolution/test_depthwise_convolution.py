"""Convolutions of rows that are one document each are torch's own depthwise ones."""

import pytest
import torch
import torch.nn.functional as F

from manyformer.nn.convolution.depthwise_convolution import convolve_rows
from manyformer.nn.runtime import device_reads


@pytest.mark.parametrize("block", ["rows", "tokens"])
@pytest.mark.parametrize("length", [1, 2, 5, 40])
@pytest.mark.parametrize("size", [1, 3, 4, 31])
@pytest.mark.parametrize("causal", [True, False])
def test_rows_are_convolved_like_conv1d_with_gradients(
    causal: bool, size: int, length: int, block: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # both rows at once, or blocks of at most three tokens
    threads = torch.get_num_threads()
    monkeypatch.setattr(device_reads, "BLOCK_ELEMENTS", 480 if block == "rows" else max(1, 18 // threads))
    x = torch.randn(2, length, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(size, 6, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn(2, length, 6, dtype=torch.float64)
    padding = size - 1 if causal else size // 2
    expected = F.conv1d(x.mT, weight.mT[:, None], padding=padding, groups=6)[..., :length].mT
    y = convolve_rows(x, weight, causal=causal)
    torch.testing.assert_close(y, expected)
    gradients = (torch.autograd.grad(outputs, [x, weight], upstream) for outputs in (y, expected))
    torch.testing.assert_close(*gradients)


def test_half_precision_is_summed_in_float32() -> None:
    x, weight = torch.randn(1, 50, 6).bfloat16(), torch.randn(31, 6).bfloat16()
    exact = convolve_rows(x.float(), weight.float(), causal=True)
    torch.testing.assert_close(convolve_rows(x, weight, causal=True), exact.bfloat16(), rtol=0, atol=0)
