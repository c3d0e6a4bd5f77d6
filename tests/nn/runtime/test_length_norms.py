"""Norms of rows: torch's composed functions, with gradients."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from manyformer.nn.runtime.length_norms import RMSNorm, rms_norm, unit_length

ROWS, WIDTH = (2, 3, 7), 12


def random_rows(shape: tuple[int, ...] = (*ROWS, WIDTH)) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(shape, dtype=torch.float64)


def composed_unit_length(x: Tensor) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 0.1).sqrt() * 0.3


@pytest.mark.parametrize("is_learned", [False, True])
@pytest.mark.parametrize("layout", ["contiguous", "heads first"])
def test_the_root_mean_square_norm_is_torchs_with_gradients(is_learned: bool, layout: str) -> None:
    rows = random_rows()
    x = (rows if layout == "contiguous" else rows.transpose(1, 2)).requires_grad_()
    weight = random_rows((WIDTH,)).requires_grad_() if is_learned else None
    inputs = [x] if weight is None else [x, weight]
    expected = F.rms_norm(x, (WIDTH,), weight, 1e-2)
    upstream = random_rows(tuple(x.shape))
    for eps, y in {None: F.rms_norm(x, (WIDTH,), weight), 1e-2: expected}.items():
        torch.testing.assert_close(rms_norm(x, weight, eps=eps), y)
    actual_grads = torch.autograd.grad(rms_norm(x, weight, eps=1e-2), inputs, upstream)
    torch.testing.assert_close(actual_grads, torch.autograd.grad(expected, inputs, upstream))
    assert torch.autograd.gradcheck(lambda *parts: rms_norm(*parts, eps=1e-2), inputs)


def test_vectors_of_a_length_equal_the_composed_functions_with_gradients() -> None:
    x = random_rows().requires_grad_()
    actual, expected = unit_length(x, scale=0.3, eps=0.1), composed_unit_length(x)
    torch.testing.assert_close(actual, expected)
    grads = [torch.autograd.grad(y, x, random_rows())[0] for y in (actual, expected)]
    torch.testing.assert_close(*grads)
    torch.testing.assert_close(unit_length(x.detach(), scale=0.3, eps=0.1), expected)


@pytest.mark.parametrize("norm", [rms_norm, unit_length])
def test_rows_of_zeros_have_finite_gradients(norm: Callable[..., Tensor]) -> None:
    x = torch.zeros(2, WIDTH, requires_grad=True)
    y = norm(x, eps=1e-6)
    y.sum().backward()
    assert not y.any()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, torch.full_like(x, 1e-6**-0.5))


def test_the_module_is_torchs_in_training_evaluation_and_half_precision() -> None:
    module, peer = RMSNorm(WIDTH, 1e-3), nn.RMSNorm(WIDTH, 1e-3)
    x = random_rows().float()
    for dtype in (torch.float32, torch.bfloat16):
        module, peer = module.to(dtype), peer.to(dtype)
        torch.testing.assert_close(module(x.to(dtype)), peer(x.to(dtype)))
    with torch.no_grad():
        assert torch.equal(module(x.bfloat16()), peer(x.bfloat16()))
    assert repr(module) == repr(peer)
