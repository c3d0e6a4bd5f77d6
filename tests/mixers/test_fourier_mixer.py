"""The Fourier layer: torch's transform, cosines and sines written out, documents by themselves, what is refused."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from manyformer.core import Context, TokenPositions
from manyformer.masks import AllKeys, Causal
from manyformer.mixers import FourierMixer
from manyformer.models.embedding import positions_of
from manyformer.ops.dft import dft_real, dft_real_reference

SEGMENTS = torch.tensor(
    [
        [0] * 11,
        [3] * 4 + [5] * 7,
        [-1] * 2 + [1] * 6 + [-1] * 3,
        [1] * 3 + [-1] * 2 + [2] * 6,
        [-1] * 11,
        list(range(11)),
    ]
)


def place_of(segments: Tensor | None, rows: int = 2, length: int = 11) -> TokenPositions:
    shape = (rows, length) if segments is None else tuple(segments.shape)
    return positions_of(torch.zeros(shape, dtype=torch.long), segments, None)[0]


@pytest.mark.parametrize("norm", ["backward", "ortho"])
@pytest.mark.parametrize("shape", [(1, 1), (1, 6), (2, 1), (5, 7), (8, 8), (11, 4), (12, 9)])
def test_all_three_ways_agree_with_torch(shape: tuple[int, int], norm: Any) -> None:
    x = torch.randn(3, *shape, dtype=torch.float64, requires_grad=True)
    place, grad_output = place_of(None, 3, shape[0]), torch.randn(3, *shape, dtype=torch.float64)
    expected = torch.fft.fft2(x, dim=(1, 2), norm=norm).real
    for actual in (dft_real(x, place, norm), dft_real_reference(x, place, norm)):
        torch.testing.assert_close(actual, expected, atol=1e-10, rtol=0)
        ours, reference = (
            torch.autograd.grad((y * grad_output).sum(), x, retain_graph=True)[0] for y in (actual, expected)
        )
        torch.testing.assert_close(ours, reference, atol=1e-10, rtol=0)


def test_the_definition() -> None:
    """One output, summed up by hand."""
    x = torch.randn(1, 5, 4, dtype=torch.float64)
    k, m = 3, 2
    total = sum(float(x[0, j, n]) * math.cos(2 * math.pi * (k * j / 5 + m * n / 4)) for j in range(5) for n in range(4))
    assert float(dft_real(x, place_of(None, 1, 5))[0, k, m]) == pytest.approx(total, abs=1e-12)


@pytest.mark.parametrize("norm", ["backward", "ortho"])
def test_documents_are_transformed_by_themselves(norm: Any) -> None:
    place = place_of(SEGMENTS)
    x = torch.randn(6, 11, 6, dtype=torch.float64, requires_grad=True)
    # a document in two pieces, and places of which nothing is known in advance
    for given in (place, place._replace(layout=None)):
        actual = dft_real(x, given, norm)
        torch.testing.assert_close(actual, dft_real_reference(x, given, norm), atol=1e-10, rtol=0)
        for row in range(6):
            for number in set(SEGMENTS[row].tolist()):
                columns = SEGMENTS[row] == number
                alone = torch.fft.fft2(x[row, columns], norm=norm).real
                expected = torch.zeros_like(alone) if number == -1 else alone
                torch.testing.assert_close(actual[row, columns], expected, atol=1e-10, rtol=0)
    grad_output = torch.randn_like(x)
    one, other = (
        torch.autograd.grad((f(x, place, norm) * grad_output).sum(), x)[0] for f in (dft_real, dft_real_reference)
    )
    torch.testing.assert_close(one, other, atol=1e-10, rtol=0)


def test_its_gradient_has_a_gradient() -> None:
    x = torch.randn(2, 5, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: dft_real(x, place_of(None, 2, 5)).sin(), x)


def test_energy_is_kept_by_cosines_and_sines_together() -> None:
    """Parseval: the real part of the transform and that of the turned one share the energy of the input."""
    x = torch.randn(1, 9, 6, dtype=torch.float64)
    full = torch.fft.fft2(x, dim=(1, 2), norm="ortho")
    real = dft_real(x, place_of(None, 1, 9), "ortho")
    assert float(real.square().sum() + full.imag.square().sum()) == pytest.approx(float(x.square().sum()), abs=1e-10)


def test_half_precision_is_summed_in_single() -> None:
    x = torch.randn(2, 300, 64).bfloat16()
    place = place_of(None, 2, 300)
    expected = dft_real(x.float(), place)
    actual = dft_real(x, place)
    assert actual.dtype == torch.bfloat16
    assert (actual.float() - expected).abs().max() < 0.005 * expected.abs().max()


def test_what_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"FourierMixer cannot apply the mask Causal\(\): each output is a sum over all"
    ):
        FourierMixer(Causal())
    with pytest.raises(ValueError, match="cannot continue from a state: a later token changes all earlier outputs"):
        FourierMixer(AllKeys()).init_state(1, device=torch.device("cpu"), dtype=torch.float32)


def test_it_is_a_layer_with_nothing_to_learn() -> None:
    x, place = torch.randn(2, 11, 4), place_of(None)
    layer = FourierMixer(norm="ortho")
    assert not list(layer.parameters())
    assert torch.equal(layer(x, Context(place)).y, dft_real(x, place, "ortho"))
