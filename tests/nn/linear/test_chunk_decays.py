"""Decayed products by halves, against the sums over all pairs and channels that they stand for."""

import math

import pytest
import torch
from torch import Tensor

from manyformer.nn.linear.chunk_decays import halved_pairs

LENGTHS = [1, 2, 3, 7, 8, 13, 16]


def written_out(rows: Tensor, columns: Tensor, decay: Tensor, lag: int) -> Tensor:
    """Each pair by itself, with the sum of the decays between its two tokens."""
    length = rows.shape[-2]
    pairs = rows.new_zeros(*rows.shape[:-1], length)
    for i in range(length):
        for j in range(i - lag + 1):
            factors = decay[..., j + 1 : i - lag + 1, :].sum(-2).exp()
            pairs[..., i, j] = (rows[..., i, :] * columns[..., j, :] * factors).sum(-1)
    return pairs


def drawn(length: int) -> list[Tensor]:
    rows, columns = (torch.randn(2, 3, length, 4, dtype=torch.float64) for _ in range(2))
    return [x.requires_grad_() for x in (rows, columns, -3 * torch.rand(2, 3, length, 4, dtype=torch.float64))]


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("length", LENGTHS)
def test_halves_give_all_pairs_with_gradients(length: int, lag: int) -> None:
    inputs = drawn(length)
    actual, expected = halved_pairs(inputs[0], inputs[1], inputs[2], lag), written_out(*inputs, lag)
    torch.testing.assert_close(actual, expected)
    direction = torch.randn_like(actual)
    if expected.requires_grad:
        gradients = (torch.autograd.grad((y * direction).sum(), inputs, allow_unused=True) for y in (actual, expected))
        for found, wanted in zip(*gradients, strict=True):
            assert found is not None
            torch.testing.assert_close(found, torch.zeros_like(found) if wanted is None else wanted)


def test_gradients_are_those_of_finite_differences() -> None:
    for lag in (0, 1):
        assert torch.autograd.gradcheck(lambda *x, lag=lag: halved_pairs(*x, lag), drawn(5))


@pytest.mark.parametrize("lag", [0, 1])
def test_a_decay_of_everything_hides_what_is_before_it_and_nothing_else(lag: int) -> None:
    rows, columns, _ = drawn(8)
    decay = torch.zeros(2, 3, 8, 4, dtype=torch.float64)
    decay[..., 5, :] = -math.inf
    pairs = halved_pairs(rows, columns, decay, lag)
    expected = (rows @ columns.mT).tril(-lag)
    expected[..., 5 + lag :, :5] = 0.0
    torch.testing.assert_close(pairs, expected)
