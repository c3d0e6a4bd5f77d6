"""Mixing by two matrices, and the variants of FNet that have it."""

import itertools
from typing import Any

import pytest
import torch

import manyformer as mf
from manyformer.core import PADDING_SEGMENT, Context
from manyformer.mixers import LinearMixer
from manyformer.models.embedding import positions_of


def test_it_is_the_definition_for_each_document() -> None:
    layer = LinearMixer(3, 6).double()
    x = torch.randn(1, 7, 3, dtype=torch.float64)
    segments = torch.tensor([[0, 0, 0, 1, 1, PADDING_SEGMENT, PADDING_SEGMENT]])
    positions, _ = positions_of(torch.zeros(1, 7, dtype=torch.long), segments, None)
    y = layer(x, Context(positions)).y
    tokens, channels = layer.tokens.weight[0], layer.channels
    for start, length in ((0, 3), (3, 2)):
        for i, d in itertools.product(range(length), range(3)):
            pairs = itertools.product(range(length), range(3))
            expected = sum(tokens[i, j] * x[0, start + j, c] * channels[c, d] for j, c in pairs)
            torch.testing.assert_close(y[0, start + i, d], expected)


def fnet(mixing: str) -> Any:
    model: Any = mf.build("fnet", vocab=20, dim=16, depth=2, max_length=12, mixing=mixing)
    return model.eval()


@pytest.mark.parametrize(
    ("mixing", "sees_others"), [("fourier", True), ("linear", True), ("random", True), ("none", False)]
)
def test_tokens_are_mixed_or_not(mixing: str, sees_others: bool) -> None:
    model, tokens = fnet(mixing), torch.randint(3, 20, (1, 8))
    other = tokens.clone()
    other[0, 5] = (tokens[0, 5] - 2) % 17 + 3
    change = (model(tokens).logits - model(other).logits).abs().amax(-1)[0]
    assert (change[[0, 1, 2, 3, 4, 6, 7]] > 0).all() == sees_others
    assert change[5] > 0


def test_random_matrices_are_not_trained_and_linear_ones_are() -> None:
    weights = {
        mixing: sum(w.numel() for w in fnet(mixing).parameters() if w.requires_grad)
        for mixing in ("fourier", "linear", "random")
    }
    assert weights["random"] == weights["fourier"]
    assert weights["linear"] == weights["fourier"] + 2 * (12 * 12 + 16 * 16)
