"""Muon against torch's, against plain loops and against matrices apart; Lion and Adafactor against their papers."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from manyformer.training.muon import COEFFICIENTS, Muon, orthogonalize, step_scale
from manyformer.training.optimizers import Lion

SHAPES = [(8, 8), (8, 8), (16, 6), (6, 16), (5, 64)]
"""Square, tall and wide matrices, two of which have one shape."""


def weights_of(shapes: list[tuple[int, ...]], seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def train(optimizers: list[torch.optim.Optimizer], weights: list[list[nn.Parameter]], steps: int = 20) -> None:
    """Give all sets of weights the same random gradients, and make a step of each optimizer."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for same in zip(*weights, strict=True):
            gradient = torch.randn(same[0].shape, generator=generator)
            for weight in same:
                weight.grad = gradient.clone()
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("scale", ["original", "match_rms_adamw"])
def test_twenty_steps_equal_those_of_torch(scale: Any, nesterov: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = weights_of(SHAPES), weights_of(SHAPES)
    settings = {"lr": 0.02, "momentum": 0.9, "nesterov": nesterov, "weight_decay": 0.1}
    muon = Muon(ours, **settings, scale=scale, ns_dtype=torch.float32)
    reference = torch.optim.Muon(theirs, **settings, adjust_lr_fn=scale)
    # torch computes the iteration in bfloat16 alone, whose rounding would hide a difference of 1e-6
    monkeypatch.setattr(Tensor, "bfloat16", Tensor.clone)
    train([muon, reference], [ours, theirs])
    for weight, expected in zip(ours, theirs):
        torch.testing.assert_close(weight, expected, atol=1e-6, rtol=0)


def test_twenty_steps_in_bfloat16_equal_those_of_torch() -> None:
    ours, theirs = weights_of(SHAPES), weights_of(SHAPES)
    train(
        [Muon(ours, lr=0.02, ns_dtype=torch.bfloat16), torch.optim.Muon(theirs, lr=0.02)],
        [ours, theirs],
    )
    # a rounding of bfloat16 that falls the other way is 0.4 % of a step
    for weight, expected in zip(ours, theirs):
        torch.testing.assert_close(weight, expected, atol=1e-3, rtol=0)


def test_momentum_of_weights_in_bfloat16_is_not_overwritten() -> None:
    # that of torch's Muon without Nesterov has the norm 1 afterwards
    weight = nn.Parameter(torch.randn(4, 6, generator=torch.Generator().manual_seed(0)).bfloat16())
    gradient = 8 * torch.randn(4, 6, generator=torch.Generator().manual_seed(1)).bfloat16()
    weight.grad = gradient.clone()
    muon = Muon([weight], lr=0.1, momentum=0.5, nesterov=False, ns_dtype=torch.bfloat16)
    muon.step()
    torch.testing.assert_close(muon.state[weight]["momentum_buffer"], gradient / 2)


def test_an_iteration_is_the_polynomial_of_singular_values() -> None:
    a, b, c = COEFFICIENTS
    matrix = torch.randn(7, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    s = s / s.norm()
    expected = u @ torch.diag(a * s + b * s**3 + c * s**5) @ v
    torch.testing.assert_close(orthogonalize(matrix, steps=1, dtype=torch.float64), expected)
    torch.testing.assert_close(orthogonalize(matrix.T, steps=1, dtype=torch.float64), expected.T)


@pytest.mark.parametrize("shape", [(64, 64), (32, 128), (128, 32)])
def test_singular_values_are_near_one(shape: tuple[int, int]) -> None:
    x = orthogonalize(torch.randn(3, *shape, generator=torch.Generator().manual_seed(0)))
    values = torch.linalg.svdvals(x)
    assert values.max() <= 1.25
    assert values.median() >= 0.65


def test_a_gradient_of_zeros_moves_nothing() -> None:
    for row_beta in (None, 0.9):
        (weight,) = weights_of([(4, 6)])
        before = weight.detach().clone()
        weight.grad = torch.zeros_like(weight)
        Muon([weight], lr=0.1, weight_decay=0.0, row_beta=row_beta).step()
        assert torch.equal(weight, before)


def test_fused_matrices_equal_matrices_apart() -> None:
    fused, q, k = weights_of([(12, 5), (4, 5), (8, 5)])
    q.data, k.data = fused.detach()[:4].clone(), fused.detach()[4:].clone()
    whole = nn.Parameter(fused.detach().clone())
    optimizers: list[torch.optim.Optimizer] = [
        Muon([fused], lr=0.1, row_beta=0.9, row_parts={fused: (4, 8)}),
        Muon([q, k], lr=0.1, row_beta=0.9),
        Muon([whole], lr=0.1, row_beta=0.9),
    ]
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        gradient = torch.randn(12, 5, generator=generator)
        fused.grad, whole.grad = gradient.clone(), gradient.clone()
        q.grad, k.grad = gradient[:4].clone(), gradient[4:].clone()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(fused, torch.cat([q, k]))
    assert (fused - whole).abs().max() > 0.01


def test_experts_equal_matrices_apart() -> None:
    (stack,) = weights_of([(3, 6, 4)])
    apart = [nn.Parameter(matrix.clone()) for matrix in stack.detach()]
    optimizers = [Muon([stack], lr=0.1, row_beta=0.9), Muon(apart, lr=0.1, row_beta=0.9)]
    for number in range(3):
        stack.grad = torch.randn(3, 6, 4, generator=torch.Generator().manual_seed(number))
        for weight, gradient in zip(apart, stack.grad):
            weight.grad = gradient.clone()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(stack, torch.stack(apart))


def test_large_matrices_are_stacked_in_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = weights_of([(4, 6)] * 5), weights_of([(4, 6)] * 5)
    train([Muon(ours, lr=0.1)], [ours], steps=2)
    monkeypatch.setattr("manyformer.training.muon.MAX_STACKED", 50)
    muon = Muon(theirs, lr=0.1)
    for weight in theirs:
        weight.grad = torch.zeros_like(weight)
    assert [len(stack) for stack, _ in muon._stacks(theirs)] == [2, 2, 1]
    train([muon], [theirs], steps=2)
    for weight, expected in zip(ours, theirs):
        torch.testing.assert_close(weight, expected)


def test_normuon_equals_a_plain_loop() -> None:
    (weight,) = weights_of([(6, 4)])
    expected = weight.detach().clone()
    muon = Muon([weight], lr=0.1, momentum=0.9, nesterov=False, weight_decay=0.0, row_beta=0.8)
    mean, rows = torch.zeros(6, 4), torch.zeros(6)
    for number in range(4):
        gradient = torch.randn(6, 4, generator=torch.Generator().manual_seed(number))
        weight.grad = gradient
        muon.step()
        mean = 0.9 * mean + 0.1 * gradient
        x = orthogonalize(mean)
        scaled = torch.zeros(6, 4)
        for row in range(6):
            rows[row] = 0.8 * rows[row] + 0.2 * x[row].square().mean()
            scaled[row] = x[row] / rows[row].sqrt()
        expected -= 0.1 * (6 / 4) ** 0.5 * scaled * x.norm() / scaled.norm()
    torch.testing.assert_close(weight.detach(), expected)
    assert muon.state[weight]["row_moments"].shape == (6, 1)


def test_cautious_decay_leaves_what_the_step_enlarges() -> None:
    (plain, cautious, free) = (weights_of([(5, 5)])[0] for _ in range(3))
    gradient = torch.randn(5, 5, generator=torch.Generator().manual_seed(3))
    for weight, settings in (
        (plain, {"weight_decay": 0.5}),
        (cautious, {"weight_decay": 0.5, "cautious": True}),
        (free, {"weight_decay": 0.0}),
    ):
        weight.grad = gradient.clone()
        Muon([weight], lr=0.1, **settings).step()
    start = weights_of([(5, 5)])[0].detach()
    shrinks = (start - free) * start >= 0
    assert 0 < shrinks.sum() < 25
    torch.testing.assert_close(cautious.detach(), torch.where(shrinks, plain, free).detach())


def test_steps_have_the_size_that_the_scale_promises() -> None:
    for rows, columns in ((64, 64), (256, 64), (64, 256)):
        x = orthogonalize(torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)))
        step = x * step_scale(rows, columns, "match_rms_adamw")
        assert step.square().mean().sqrt().item() == pytest.approx(0.2, rel=0.2)
    assert step_scale(16, 4, "original") == 2.0
    assert step_scale(4, 16, "original") == 1.0


def test_what_is_no_matrix_is_refused() -> None:
    with pytest.raises(ValueError, match=r"not for a weight \(3,\)"):
        Muon(weights_of([(3,)]))


def test_lion_equals_the_formula() -> None:
    (weight,) = weights_of([(3, 4)])
    expected, mean = weight.detach().clone(), torch.zeros(3, 4)
    lion = Lion([weight], lr=0.01, betas=(0.9, 0.99), weight_decay=0.5)
    for number in range(4):
        gradient = torch.randn(3, 4, generator=torch.Generator().manual_seed(number))
        weight.grad = gradient
        lion.step()
        expected -= 0.01 * ((0.9 * mean + 0.1 * gradient).sign() + 0.5 * expected)
        mean = 0.99 * mean + 0.01 * gradient
    torch.testing.assert_close(weight.detach(), expected)


def test_two_processes_with_shards_make_the_steps_of_one(tmp_path: Path) -> None:
    script = Path(__file__).with_name("sharded_muon.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen([sys.executable, str(script), rank, str(tmp_path / "group")], env=environment) for rank in "01"
    ]
    assert [process.wait(timeout=300) for process in processes] == [0, 0]
