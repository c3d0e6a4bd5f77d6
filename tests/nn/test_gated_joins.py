"""Gates: their equations, torch's gated recurrent unit, and the identity that they begin near."""

from collections.abc import Callable
from typing import get_args

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyformer.base.errors import UserError
from manyformer.nn.decoding.bound_step import bind_join
from manyformer.nn.residual import GatedJoin, GateName, GRUGate, make_join
from perturbing import perturb

DIM = 5
GATES = [gate for gate in get_args(GateName) if gate != "residual"]


def perturbed_gate(gate: GateName, gate_bias: float = 2.0) -> GatedJoin:
    torch.manual_seed(1)
    join = make_join(gate, DIM, gate_bias=gate_bias)
    assert isinstance(join, GatedJoin)
    perturb(join.double(), 0.5)
    return join


def stream_and_branch() -> tuple[Tensor, Tensor]:
    x, y = torch.randn(2, 2, 3, DIM, dtype=torch.float64)
    return x, y


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


EQUATIONS: dict[str, Callable[[dict[str, Tensor], Tensor, Tensor], Tensor]] = {
    "input": lambda w, x, y: sigmoid(x @ w["weight"].T) * x + y,
    "output": lambda w, x, y: x + sigmoid(x @ w["weight"].T - w["bias"]) * y,
    "highway": lambda w, x, y: (
        sigmoid(x @ w["weight"].T + w["bias"]) * x + (1 - sigmoid(x @ w["weight"].T + w["bias"])) * y
    ),
    "sigtanh": lambda w, x, y: (
        x + sigmoid(y @ w["branch_weight"][:DIM].T - w["bias"]) * torch.tanh(y @ w["branch_weight"][DIM:].T)
    ),
}


def gru_equation(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    (w_r, w_z, w_g), (u_r, u_z) = weights["branch_weight"].chunk(3), weights["stream_weight"].chunk(2)
    reset, update = sigmoid(y @ w_r.T + x @ u_r.T), sigmoid(y @ w_z.T + x @ u_z.T - weights["bias"])
    candidate = torch.tanh(y @ w_g.T + (reset * x) @ weights["candidate_weight"].T)
    return (1 - update) * x + update * candidate


EQUATIONS["gru"] = gru_equation


@pytest.mark.parametrize("gate", GATES)
def test_a_gate_is_its_equation_with_gradients(gate: GateName) -> None:
    join, (x, y) = perturbed_gate(gate), stream_and_branch()
    x.requires_grad_(), y.requires_grad_()
    weights = dict(join.named_parameters())
    leaves = [x, y, *weights.values()]
    actual, expected = join(x, y), EQUATIONS[gate](weights, x, y)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(bind_join(join)(x, y), expected)
    direction = torch.randn_like(expected)
    torch.testing.assert_close(*(torch.autograd.grad(out, leaves, direction) for out in (actual, expected)))


def test_the_gated_recurrent_unit_is_torchs_where_the_candidate_matrix_is_diagonal() -> None:
    """Then it does not matter whether the reset acts before or after it; z is the share of the old state in torch."""
    join, (x, y) = perturbed_gate("gru"), stream_and_branch()
    assert isinstance(join, GRUGate)
    (w_r, w_z, w_g), (u_r, u_z) = join.branch_weight.data.chunk(3), join.stream_weight.data.chunk(2)
    diagonal = torch.randn(DIM).double().diag()
    join.candidate_weight.data.copy_(diagonal)
    cell = nn.GRUCell(DIM, DIM).double()
    cell.weight_ih.data.copy_(torch.cat([w_r, -w_z, w_g]))
    cell.weight_hh.data.copy_(torch.cat([u_r, -u_z, diagonal]))
    cell.bias_hh.data.zero_()
    cell.bias_ih.data.copy_(F.pad(join.bias.data, (DIM, DIM)))
    expected = cell(y.flatten(0, 1), x.flatten(0, 1)).view_as(x)
    torch.testing.assert_close(join(x, y), expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("gate", [gate for gate in GATES if gate != "input"])
def test_the_larger_the_bias_the_closer_a_gate_is_to_the_stream(gate: GateName) -> None:
    x, y = stream_and_branch()
    biases = (0.0, 2.0, 10.0, 1e3)
    with torch.no_grad():
        distances = [float((perturbed_gate(gate, bias)(x, y) - x).abs().max()) for bias in biases]
    assert distances == sorted(distances, reverse=True)
    assert distances[-1] == 0.0


def test_the_dropout_of_a_gate_acts_on_the_branch() -> None:
    join = make_join("output", DIM, dropout=0.5)
    assert join is not None
    x = torch.randn(1, 4, DIM)
    assert torch.equal(join(x, torch.zeros_like(x)), x)
    y = torch.randn_like(x)
    assert not torch.equal(join.train()(x, y), join.eval()(x, y))
    torch.testing.assert_close(bind_join(join)(x, y), join(x, y))


def test_a_sum_needs_no_module_and_unknown_gates_are_refused() -> None:
    assert make_join("residual", DIM) is None
    with pytest.raises(
        UserError, match=r"gate \('lstm'\) must be one of residual, input, output, highway, sigtanh, gru"
    ):
        make_join("lstm", DIM)  # type: ignore[arg-type]
