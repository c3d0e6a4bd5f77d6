"""The recurrence of decayed, corrected memories: chunks give what the loop over tokens gives, which is its formula."""

import math
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from manyformer.nn.linear import linear_attention, matrix_recurrence
from manyformer.nn.linear.matrix_recurrence import Removal

ROWS, HEADS, R, W = 2, 3, 5, 4
LENGTHS = [1, 2, 15, 16, 17, 63, 64, 65, 131, 200]
FORMS = ["decay", "delta", "general"]
WIDTHS = {"none": 0, "per token": 1, "per channel": R}


def chunked_unread(*inputs: Any, **named_inputs: Any) -> Any:
    """Chunks as on a device that the host does not ask how strong decays are."""
    with patch.object(matrix_recurrence, "reads_are_free", lambda x: False):
        return matrix_recurrence.chunked(*inputs, **named_inputs)


def draw(length: int, *channels: int) -> Tensor:
    return torch.randn(ROWS, HEADS, length, *channels, dtype=torch.float64)


def drawn_inputs(form: str, width: int, length: int, strongest: float) -> dict[str, Any]:
    torch.manual_seed(length)
    k = F.normalize(draw(length, R), dim=-1)
    inputs: dict[str, Any] = {"q": draw(length, R), "k": k, "v": draw(length, W)}
    inputs["memory"] = torch.randn(ROWS, HEADS, R, W, dtype=torch.float64)
    inputs["decay"] = -strongest * torch.rand_like(draw(length, width)) if width else None
    if form == "delta":
        inputs["strength"] = 2 * torch.rand_like(draw(length))
    if form == "general":
        inputs["removal"] = Removal(k + 0.1 * draw(length, R), k * torch.rand_like(k))
    return inputs


def written_out(inputs: dict[str, Any], run: Tensor | None) -> Tensor:
    """The formula for one head of one row at a time, with matrices D, I - b k k^T and D - u w^T."""
    rows = []
    for b in range(ROWS):
        for h in range(HEADS):
            q, k, v = (inputs[name][b, h] for name in ("q", "k", "v"))
            state = inputs["memory"][b, h]
            for i in range(len(q)):
                if run is not None and run[b, i] != (run[b, i - 1] if i else 0):
                    state = torch.zeros_like(state)
                before = state
                if inputs["decay"] is not None:
                    state = torch.diag(inputs["decay"][b, h, i].exp().expand(R)) @ state
                b_i = inputs["strength"][b, h, i] if "strength" in inputs else 1.0
                if "strength" in inputs:
                    state = (torch.eye(R, dtype=q.dtype) - b_i * torch.outer(k[i], k[i])) @ state
                if "removal" in inputs:
                    w, u = (x[b, h, i] for x in inputs["removal"])
                    state = state - torch.outer(u, w) @ before
                state = state + b_i * torch.outer(k[i], v[i])
                rows.append(state.T @ q[i])
    return torch.stack(rows).view(ROWS, HEADS, -1, W)


def drawn_run(length: int) -> Tensor:
    starts = torch.rand(ROWS, length, generator=torch.Generator().manual_seed(length)) < 0.1
    return starts.long().cumsum(1)


def differentiated(form: Any, inputs: dict[str, Any], run: Tensor | None) -> list[Tensor]:
    """Outputs, the last memory and the gradients of all inputs."""
    leaves: list[Tensor] = []

    def leaf(x: Any) -> Any:
        if isinstance(x, Removal):
            return Removal(leaf(x.w), leaf(x.u))
        leaves.append(x.detach().requires_grad_())
        return leaves[-1]

    y, last = form(**{name: None if x is None else leaf(x) for name, x in inputs.items()}, run=run)
    grad_output = torch.randn(y.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(y.dtype)
    return [y, last, *torch.autograd.grad((y * grad_output).sum() + last.square().sum(), leaves)]


@pytest.mark.thinned(2)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("form", FORMS)
def test_chunks_are_steps_with_gradients(form: str, width: str, length: int) -> None:
    """With documents, a memory before them, and decays that need short chunks or pairs of their own."""
    for strongest, run in ((1.0, None), (1.0, drawn_run(length)), (40.0, drawn_run(length))):
        inputs = drawn_inputs(form, WIDTHS[width], length, strongest)
        stepped = differentiated(matrix_recurrence.recurrent, inputs, run)
        for function in (matrix_recurrence.chunked, chunked_unread):
            torch.testing.assert_close(differentiated(function, inputs, run), stepped, atol=1e-11, rtol=1e-11)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("form", FORMS)
def test_the_loop_is_the_formula(form: str, width: str) -> None:
    inputs, run = drawn_inputs(form, WIDTHS[width], 17, 1.0), drawn_run(17)
    y, _ = matrix_recurrence.recurrent(**inputs, run=run)
    torch.testing.assert_close(y, written_out(inputs, run), atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_gradients_are_those_of_finite_differences(form: str) -> None:
    inputs = {
        name: Removal(*(y[:1, :1] for y in x)) if name == "removal" else x[:1, :1]
        for name, x in drawn_inputs(form, R, 5, 1.0).items()
    }
    names = [name for name in inputs if name != "removal"]

    def call(*values: Tensor) -> tuple[Tensor, ...]:
        given = dict(zip(names, values)) | ({"removal": inputs["removal"]} if "removal" in inputs else {})
        return tuple(matrix_recurrence.chunked(**given, chunk=3))

    assert torch.autograd.gradcheck(call, [inputs[name].requires_grad_() for name in names])


@pytest.mark.thinned(3)
@pytest.mark.parametrize("mean", [0.03, 1.6])
@pytest.mark.parametrize("width", [1, 16])
@pytest.mark.parametrize("form", FORMS)
def test_float32_over_8192_steps(form: str, width: int, mean: float) -> None:
    """A product q e^G k e^-G over the whole text would be infinite after 47 tokens of the strongest decay."""
    torch.manual_seed(0)
    shape = (1, 1, 8192)
    q, v = (torch.randn(*shape, 16) for _ in range(2))
    k, decay = F.normalize(torch.randn(*shape, 16), dim=-1), -2 * mean * torch.rand(*shape, width)
    inputs: dict[str, Any] = {"q": q, "k": k, "v": v, "decay": decay}
    if form == "delta":
        inputs["strength"] = 2 * torch.rand(shape)
    if form == "general":
        inputs["removal"] = Removal(k, k * torch.rand_like(k))
    exact = {
        name: Removal(*(part.double() for part in x)) if isinstance(x, Removal) else x.double()
        for name, x in inputs.items()
    }
    expected, _ = matrix_recurrence.recurrent(**exact)
    for function in (matrix_recurrence.chunked, chunked_unread, matrix_recurrence.recurrent):
        y, _ = function(**inputs)
        assert ((y.double() - expected).abs().amax() / expected.abs().amax()) < 1e-5


NATS = [0.01, 0.3, 1.0, 2.0, 3.5, 10.0, 50.0, 90.0, 1e3, 1e4]


def float32_inputs(form: str, width: int, nats: float, *, is_mixed: bool) -> dict[str, Any]:
    """Inputs of 131 tokens, of which all forget by about `nats`, or a quarter, and the others by 0.01."""
    inputs = {
        name: Removal(*(part.float() for part in x)) if isinstance(x, Removal) else x.float()
        for name, x in drawn_inputs(form, width, 131, 1.0).items()
    }
    share = torch.rand(inputs["decay"].shape)
    inputs["decay"] = -nats * (0.01 / nats + (share < 0.25)) if is_mixed else -nats * (0.5 + share)
    return inputs


def linear_chunks(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, run: Tensor | None, memory: Tensor) -> Any:
    return linear_attention.chunked(q, k, v, decay, run, memory)


@pytest.mark.parametrize("is_mixed", [True, False], ids=["a quarter forgets", "all forget"])
@pytest.mark.parametrize(
    ("form", "width", "functions"),
    [
        ("decay", 1, (linear_chunks, matrix_recurrence.chunked)),
        ("delta", 1, (matrix_recurrence.chunked,)),
        ("decay", R, (matrix_recurrence.chunked, chunked_unread)),
        ("delta", R, (matrix_recurrence.chunked, chunked_unread)),
        ("general", R, (matrix_recurrence.chunked, chunked_unread)),
    ],
)
def test_chunks_in_float32_have_the_precision_of_a_loop(
    form: str, width: int, functions: tuple[Any, ...], is_mixed: bool
) -> None:
    """Outputs, memory and all gradients at decays of 0.01 to 10,000 nats, with documents, against float64.

    Each result is a sum of at most 131 terms of the size of the largest, so that float32, which rounds by 6e-8, leaves
    less than 131 x 6e-8 = 8e-6 at worst, and about the root of this number of roundings, 7e-7, in fact. Sums of decays
    rounded as one number would leave 4e-6 at 60 nats, 6e-4 at 1,000 and 7e-3 at 10,000."""
    for nats in NATS:
        inputs = float32_inputs(form, width, nats, is_mixed=is_mixed)
        exact = {
            name: Removal(*(part.double() for part in x)) if isinstance(x, Removal) else x.double()
            for name, x in inputs.items()
        }
        expected = differentiated(matrix_recurrence.recurrent, exact, drawn_run(131))
        # beyond 90 nats what remains of a decay is below the numbers that float32 has
        largest = [wanted.abs().amax().clamp(min=1e-37) for wanted in expected]
        for function in functions:
            actual = differentiated(function, inputs, drawn_run(131))
            errors = [((x.double() - y).abs().amax() / size).item() for x, y, size in zip(actual, expected, largest)]
            assert max(errors) < 5e-6, (function, nats, errors)


@given(
    nats=st.lists(st.sampled_from([0.0, 1e-3, 0.1, 2.0, 20.0, 100.0, 1e3, 1e6, math.inf]), min_size=40, max_size=40),
    width=st.sampled_from([1, R]),
    form=st.sampled_from(FORMS),
)
@settings(max_examples=60, deadline=None)
def test_any_order_of_decays_keeps_the_digits_of_the_weak_ones(nats: list[float], width: int, form: str) -> None:
    """Also decays of nothing and of everything, whose logarithm is -inf."""
    inputs = drawn_inputs(form, width, 40, 1.0)
    inputs["decay"] = -torch.tensor(nats, dtype=torch.float64)[:, None].expand(ROWS, HEADS, 40, width)
    expected, memory = matrix_recurrence.recurrent(**inputs)
    in_float32 = {
        name: Removal(*(part.float() for part in x)) if isinstance(x, Removal) else x.float()
        for name, x in inputs.items()
    }
    for function in (matrix_recurrence.chunked, chunked_unread):
        actual = function(**in_float32)
        for found, wanted in ((actual.y, expected), (actual.memory, memory)):
            assert float((found.double() - wanted).abs().amax() / wanted.abs().amax()) < 5e-6


def test_a_strength_of_two_makes_a_sign_of_each_bit() -> None:
    """The eigenvalue 1 - b of the transition is -1 at b = 2, so that a memory tracks parity (arXiv:2411.12537)."""
    bits = torch.randint(0, 2, (1, 1, 50), generator=torch.Generator().manual_seed(0)).double()
    key = torch.tensor([1.0, 0.0], dtype=torch.float64).expand(1, 1, 50, 2)
    memory = torch.tensor([[[[1.0], [0.0]]]], dtype=torch.float64)
    zeros = torch.zeros(1, 1, 50, 1, dtype=torch.float64)
    y, _ = matrix_recurrence.chunked(key, key, zeros, memory=memory, strength=2 * bits, chunk=8)
    torch.testing.assert_close(y[0, 0, :, 0], 1 - 2 * (bits[0, 0].cumsum(0) % 2))
