"""The selective scan: a loop in plain numbers, chunks against it with gradients, and 8,192 tokens in float32."""

from functools import partial

import pytest
import torch
from torch import Tensor

from manyformer.nn.recurrent.selective_scan import selective_scan, selective_scan_reference

ROWS, CHANNELS, STATE = 2, 5, 3


def drawn_inputs(length: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    torch.manual_seed(length)
    x, steps = torch.randn(ROWS, length, CHANNELS), torch.rand(ROWS, length, CHANNELS)
    rates, (writes, reads) = -3 * torch.rand(CHANNELS, STATE), torch.randn(2, ROWS, length, STATE)
    memory = torch.randn(ROWS, CHANNELS, STATE)
    return [part.to(dtype).requires_grad_() for part in (x, steps, rates, writes, reads, memory)]


@pytest.mark.parametrize("signed", [False, True])
def test_the_reference_is_the_formula(*, signed: bool) -> None:
    inputs = drawn_inputs(6)
    x, steps, rates, writes, reads, memory = (part.detach() for part in inputs)
    expected = torch.empty(ROWS, 6, CHANNELS, dtype=torch.float64)
    for b in range(ROWS):
        for n in range(CHANNELS):
            h = memory[b, n].tolist()
            for t in range(6):
                factors = [float((steps[b, t, n] * rate).exp()) for rate in rates[n]]
                if signed:
                    # from -1 for the largest step to 1 for none
                    factors = [2 * factor - 1 for factor in factors]
                added = [float(steps[b, t, n] * x[b, t, n] * write) for write in writes[b, t]]
                h = [h[s] * factors[s] + added[s] for s in range(STATE)]
                expected[b, t, n] = sum(a * float(c) for a, c in zip(h, reads[b, t]))
    torch.testing.assert_close(selective_scan_reference(*inputs, signed=signed).y, expected)


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 33])
@pytest.mark.parametrize("with_starts", [False, True])
@pytest.mark.parametrize("signed", [False, True])
def test_chunks_equal_the_reference_with_gradients(length: int, *, with_starts: bool, signed: bool) -> None:
    inputs, results = drawn_inputs(length), []
    starts = torch.rand(ROWS, length) < 0.2 if with_starts else None
    for scan in (selective_scan_reference, partial(selective_scan, chunk=8)):
        y, memory = scan(*inputs, starts, signed=signed)
        results.append([y, memory, *torch.autograd.grad(y.sin().sum() + memory.square().sum(), inputs)])
    torch.testing.assert_close(results[1], results[0], atol=1e-12, rtol=0)


@pytest.mark.parametrize("elements", [1, 8 * CHANNELS * STATE, 3 * 8 * CHANNELS * STATE])
def test_groups_of_rows_equal_all_rows_with_gradients(monkeypatch: pytest.MonkeyPatch, elements: int) -> None:
    """Groups of one row and of three, of five rows with documents that start anywhere."""
    torch.manual_seed(0)
    x, steps = torch.randn(5, 21, CHANNELS), torch.rand(5, 21, CHANNELS)
    rates, (writes, reads) = -torch.rand(CHANNELS, STATE), torch.randn(2, 5, 21, STATE)
    inputs = [
        part.double().requires_grad_() for part in (x, steps, rates, writes, reads, torch.randn(5, CHANNELS, STATE))
    ]
    starts, results = torch.rand(5, 21) < 0.2, []
    monkeypatch.setattr("manyformer.nn.recurrent.selective_scan.SCAN_ELEMENTS", elements)
    for scan in (selective_scan_reference, lambda *parts: selective_scan(*parts, chunk=8)):
        y, memory = scan(*inputs, starts)  # type: ignore[operator]
        results.append([y, memory, *torch.autograd.grad(y.sin().sum() + memory.square().sum(), inputs)])
    torch.testing.assert_close(results[1], results[0], atol=1e-12, rtol=0)


def test_long_rows_in_float32() -> None:
    """Decays of 0.03 to 1.6 nats a token in the mean, relative to the largest output of a channel in float64."""
    x, steps, _, writes, reads, _ = (part.detach() for part in drawn_inputs(8192))
    rates = -torch.logspace(-1.22, 0.51, CHANNELS, dtype=torch.float64)[:, None].expand(-1, STATE)
    inputs = x, steps, rates, writes, reads, x.new_zeros(ROWS, CHANNELS, STATE)
    expected, y = selective_scan(*inputs).y, selective_scan(*(part.float() for part in inputs)).y
    assert ((y - expected).abs().amax(1) <= 1e-5 * expected.abs().amax(1)).all()
