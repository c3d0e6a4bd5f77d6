"""Weights in few bytes: what is read back differs by half a level at most, and pooling keeps single tokens."""

import base64
import zlib

import pytest
import torch
from pages import random_weights

from manyformer.analysis.viewer.model_view import encode_weights, pool_largest, quantize_weights


@pytest.mark.parametrize("sign", [1, -1])
def test_a_weight_is_read_back_within_half_a_level_of_its_row(sign: int) -> None:
    weights = random_weights(3, 20, causal=True)
    weights[:, ::3] *= sign
    scales, levels = quantize_weights(weights)
    error = ((levels - levels.sign() / 2) / 126.5 * scales[..., None] - weights).abs()
    assert (error <= scales[..., None] / 126.5 * 0.501).all()
    assert ((levels == 0) == (weights == 0)).all()


def test_a_row_without_weights_stays_empty() -> None:
    scales, levels = quantize_weights(torch.zeros(1, 2, 3))
    assert not scales.any()
    assert not levels.any()


def test_the_bytes_are_scales_and_then_levels_of_all_maps() -> None:
    first, second = random_weights(2, 3), -random_weights(1, 4)
    encoded = encode_weights([first, second])
    content = zlib.decompress(base64.b64decode(encoded.text))
    assert len(content) == 4 * (2 * 3 + 4) + 2 * 9 + 16
    scales = torch.frombuffer(bytearray(content[:40]), dtype=torch.float32)
    torch.testing.assert_close(scales[:6], first.amax(-1).flatten(), rtol=0, atol=0)
    levels = torch.frombuffer(bytearray(content[40:]), dtype=torch.int8)
    torch.testing.assert_close(levels[:9], quantize_weights(first).levels[0].flatten())
    torch.testing.assert_close(levels[18:], quantize_weights(second).levels.flatten())


def test_large_maps_are_pooled_until_they_fit() -> None:
    weights = random_weights(2, 64)
    assert encode_weights([weights], max_characters=12_000).pooling == 1
    encoded = encode_weights([weights], max_characters=2_000)
    assert encoded.pooling == 4
    assert encoded.levels[0].levels.shape == (2, 16, 16)
    assert len(encoded.text) <= 2_000


def test_pooling_keeps_the_largest_weight_and_its_sign() -> None:
    weights = torch.tensor([[[0.1, -0.9, 0.2], [0.3, 0.0, 0.0], [0.0, 0.5, -0.1]]])
    assert torch.equal(pool_largest(weights, 2), torch.tensor([[[-0.9, 0.2], [0.5, -0.1]]]))
