"""The recurrence with a gradient by hand against the one that torch derives, step by step."""

from typing import Any

import pytest
import torch
from torch import Tensor

from manyformer.nn.recurrent.gru_scan import ScanResult, StateResets, StepAttention, gru_scan, gru_scan_reference

LENGTH, ROWS, SOURCE, DIM, ALIGN = 6, 3, 5, 4, 7

CASES = {
    "two units": {"units": 2},
    "two units, packed": {"units": 2, "breaks": "begins"},
    "two units, padding anywhere": {"units": 2, "breaks": "held"},
    "looking": {"look": "all"},
    "looking at some": {"look": "some"},
    "looking at some, packed": {"look": "some", "breaks": "starts"},
    "looking at all, padding anywhere": {"look": "all", "breaks": "both"},
}


class Inputs:
    """All that a recurrence is given, and a random function of all that it gives."""

    def __init__(self, dtype: torch.dtype, units: int = 1, look: str = "", breaks: str = "") -> None:
        def leaf(*shape: int) -> Tensor:
            return torch.randn(*shape, dtype=torch.float64).to(dtype).requires_grad_()

        self.own = [leaf(units, LENGTH, ROWS, 3 * DIM), leaf(units, DIM, 2 * DIM), leaf(units, DIM, DIM)]
        self.own.append(leaf(units, ROWS, DIM))
        self.looked = [leaf(DIM, ALIGN), leaf(ROWS, SOURCE, ALIGN), leaf(ROWS, SOURCE, 3 * DIM), leaf(ALIGN)]
        self.starts = leaf(units, LENGTH, ROWS, DIM)
        seen = torch.rand(LENGTH, ROWS, SOURCE) < 0.6
        seen[2, 1] = False
        self.look = StepAttention(*self.looked, seen if look == "some" else None) if look else None
        begins, real = torch.rand(LENGTH, ROWS) < 0.4, torch.rand(LENGTH, ROWS) < 0.7
        held, starts = breaks in ("held", "both"), breaks in ("starts", "both")
        self.breaks = StateResets(begins, real if held else None, self.starts if starts else None) if breaks else None
        self.leaves = [*self.own, *(self.looked if look else []), *([self.starts] if starts else [])]
        self.ups = [leaf(*shape) for shape in ((units, LENGTH, ROWS, DIM),) * 2 + ((LENGTH, ROWS, SOURCE),)]

    def __call__(self, run: Any) -> tuple[ScanResult, list[Tensor]]:
        actual = ScanResult(*run(*self.own, self.look, self.breaks))
        full = sum((grad_output * part).sum() for grad_output, part in zip(self.ups, actual) if part is not None)
        assert isinstance(full, Tensor)
        return actual, list(torch.autograd.grad(full, self.leaves))


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-10), (torch.float32, 1e-5)], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_the_gradient_by_hand_is_that_of_every_step(case: str, dtype: torch.dtype, bound: float) -> None:
    inputs = Inputs(dtype, **CASES[case])  # type: ignore[arg-type]
    (fast, grads), (slow, expected) = inputs(gru_scan), inputs(gru_scan_reference)
    for actual, expected_gradient in zip([*fast, *grads], [*slow, *expected]):
        if expected_gradient is not None:
            torch.testing.assert_close(actual, expected_gradient, atol=bound, rtol=bound)


def test_what_nobody_asks_for_costs_no_gradient() -> None:
    inputs = Inputs(torch.float64, look="some")
    for kept in range(3):
        grads = [torch.autograd.grad(ScanResult(*run(*inputs.own, inputs.look))[kept].sin().sum(), inputs.leaves[:3])
                 for run in (gru_scan, gru_scan_reference)]  # fmt: skip
        for actual, expected in zip(*grads):
            torch.testing.assert_close(actual, expected, atol=1e-10, rtol=1e-10)


def test_weights_are_shares_of_what_is_seen() -> None:
    inputs = Inputs(torch.float32, look="some")
    assert inputs.look is not None
    assert inputs.look.visible is not None
    weights = gru_scan_reference(*inputs.own, inputs.look).weights
    assert weights is not None
    assert not weights[~inputs.look.visible].any()
    torch.testing.assert_close(weights.sum(-1), inputs.look.visible.any(-1).float())


def test_it_stays_in_single_precision() -> None:
    inputs = Inputs(torch.bfloat16, look="all")
    with torch.no_grad():
        assert {part.dtype for part in gru_scan(*inputs.own, inputs.look) if part is not None} == {torch.float32}
