"""Absolute positions against the formula of the paper, written with a plain loop."""

import math

import pytest
import torch

from manyformer.position import Learned, Sinusoid


@pytest.mark.parametrize("layout", ["interleaved", "halves"])
def test_sinusoid_is_the_formula(layout):
    dim, length = 10, 50
    expected = torch.zeros(length, dim)
    for pos in range(length):
        for i in range(dim // 2):
            angle = pos / 10000 ** (2 * i / dim)
            even, odd = (2 * i, 2 * i + 1) if layout == "interleaved" else (i, dim // 2 + i)
            expected[pos, even], expected[pos, odd] = math.sin(angle), math.cos(angle)
    torch.testing.assert_close(Sinusoid(dim, layout=layout).table[:length], expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("dim", [64, 63])
def test_learned_positions_start_as_scaled_sinusoids(dim):
    table = Learned(dim, 40, std=0.05).weight.detach()
    assert table.shape == (40, dim)
    assert 0.045 < table.pow(2).mean().sqrt() < 0.055
    near, far = (torch.cosine_similarity(table[0], table[k], dim=0) for k in (1, 30))
    assert near > 0.9 > far
    if dim == 64:
        torch.testing.assert_close(table / (0.05 * math.sqrt(2)), Sinusoid(dim).table[:40])
