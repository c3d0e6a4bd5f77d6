"""Mamba-3's layer against its formula in complex numbers, without its new parts, and in pieces."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from layouts import LAYOUTS, LENGTH, ROWS, apart, differentiated, documents_of, in_steps, place_of, real_of
from manyformer.models.embedding import positions_of
from manyformer.nn.core import Context
from manyformer.nn.linear import linear_attention
from manyformer.nn.recurrent.mamba_3_mixer import Mamba3Mixer
from token_rows import range_positions

DIM, HEADS, VALUE, STATE = 6, 2, 3, 8


def make() -> Mamba3Mixer:
    torch.manual_seed(0)
    layer = Mamba3Mixer(DIM, HEADS, value_dim=VALUE, state_dim=STATE).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
        # steps near 1, so that angles and decays are large
        layer.dt_bias.add_(3.0)
    return layer


def normalized(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()


def turned(x: Tensor, angles: Tensor) -> Tensor:
    """Pairs of the first half as complex numbers."""
    pairs = torch.view_as_complex(x[: STATE // 2].reshape(-1, 2).contiguous()) * torch.polar(
        torch.ones_like(angles), angles
    )
    return torch.cat([torch.view_as_real(pairs).flatten(), x[STATE // 2 :]])


def written_out(layer: Mamba3Mixer, x: Tensor) -> Tensor:
    """One document (l, d), head by head and token by token."""
    inner = HEADS * VALUE
    sizes = [inner, inner, STATE, STATE, HEADS, HEADS, HEADS, STATE // 4]
    z, v, k, q, steps, rates, shares, turns = torch.split(x @ layer.in_proj.weight.T, sizes, -1)
    outputs = []
    for h in range(HEADS):
        memory = x.new_zeros(STATE, VALUE)
        angles = x.new_zeros(STATE // 4)
        last = x.new_zeros(STATE, VALUE)
        for i in range(len(x)):
            step = torch.log1p((steps[i, h] + layer.dt_bias[h]).exp())
            gate = rates[i, h]
            rate = 1 + gate if gate >= 0 else 1 / (1 - gate)
            share = torch.sigmoid(shares[i, h])
            angles = angles + math.pi * turns[i].tanh() * step
            key = turned(normalized(k[i], layer.key_norm.weight) + layer.key_bias[h], angles)
            query = turned(normalized(q[i], layer.query_norm.weight) + layer.query_bias[h], angles)
            value = v[i, h * VALUE : (h + 1) * VALUE]
            alpha = (-step * rate).exp()
            new = torch.outer(key, value)
            memory = alpha * memory + (1 - share) * step * alpha * last + share * step * new
            last = new
            outputs.append(memory.T @ query + layer.skip[h] * value)
    y = torch.stack(outputs).view(HEADS, len(x), VALUE).transpose(0, 1).flatten(1)
    return (y * F.silu(z)) @ layer.out_proj.weight.T


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_layer_is_the_formula_with_its_gradients(layout: str) -> None:
    layer, real = make(), real_of(layout)[:, 0]
    x = torch.randn(ROWS, LENGTH, DIM, dtype=torch.float64, requires_grad=True)
    y = layer(x, Context(place_of(layout))).y
    expected = torch.zeros_like(y)
    for row, columns in documents_of(layout):
        expected = expected.index_put((torch.tensor(row), columns), written_out(layer, x[row, columns]))
    leaves = [x, *layer.parameters()]
    grad_output = torch.randn_like(y) * real
    actual = differentiated(y * real, grad_output, leaves)
    assert apart(actual, differentiated(expected, grad_output, leaves)) < 1e-10
    # a gate or an angle without a gradient would not be learned
    assert all(grad.any() for grad in actual[1:])
    rows = layer.row_parts()["in_proj.weight"]
    projection = torch.autograd.grad((layer(x, Context(place_of(layout))).y * grad_output).sum(), layer.in_proj.weight)
    assert all(part.any() for part in torch.split(projection[0], list(rows)))


@pytest.mark.parametrize("sizes", [[1] * 23, [5, 1, 9, 8]], ids=["steps", "chunks"])
@pytest.mark.parametrize("layout", ["plain", "left padding", "packed", "single tokens"])
def test_a_state_of_constant_size_continues_documents(layout: str, sizes: list[int]) -> None:
    layer, real = make(), real_of(layout)[:, 0]
    x = torch.randn(ROWS, LENGTH, DIM, dtype=torch.float64)
    state, outputs = layer.init_state(ROWS, device=x.device, dtype=x.dtype), []
    with torch.no_grad():
        for columns, positions in in_steps(layout, sizes):
            y, state, _ = layer(x[:, columns], Context(positions), state)
            outputs.append(y)
        expected = layer(x, Context(place_of(layout))).y
    torch.testing.assert_close(torch.cat(outputs, 1) * real, expected * real, atol=1e-10, rtol=0)
    assert state.memory.shape == (ROWS, HEADS, STATE, VALUE)
    assert state.previous.x.shape == (ROWS, 1, HEADS * (STATE + VALUE))


def test_without_turns_and_previous_tokens_it_is_a_decayed_sum() -> None:
    """Mamba-2's rule: Euler's step, and real memories."""
    layer = make()
    gate, v, k, q, steps, rates, shares, turns = torch.split(
        layer.in_proj.weight.data, list(layer.row_parts()["in_proj.weight"])
    )
    x = torch.rand(1, 40, DIM, dtype=torch.float64) + 0.5
    with torch.no_grad():
        # inputs are positive, so that these gates are far from 0
        shares.fill_(60.0)
        turns.zero_()
        y = layer(x, Context(range_positions(40))).y
        step = F.softplus(x @ steps.T + layer.dt_bias)
        rate_gate = x @ rates.T
        rate = torch.where(rate_gate >= 0, 1 + rate_gate, 1 / (1 - rate_gate))
        key = normalized(x @ k.T, layer.key_norm.weight)[:, None] + layer.key_bias[:, None]
        query = normalized(x @ q.T, layer.query_norm.weight)[:, None] + layer.query_bias[:, None]
        values = (x @ v.T).view(1, 40, HEADS, VALUE).transpose(1, 2)
        decay = (-step * rate).mT[..., None]
        read, _, _ = linear_attention.quadratic(query, key, step.mT[..., None] * values, decay)
        expected = (read + layer.skip[:, None, None] * values).transpose(1, 2).flatten(2) * F.silu(x @ gate.T)
    torch.testing.assert_close(y, expected @ layer.out_proj.weight.T, atol=1e-10, rtol=0)


def test_angles_of_a_long_document_are_those_of_a_short_one_in_float32() -> None:
    """A document of 8 tokens behind one of 8,192, whose angles add up to thousands of turns."""
    layer = make().float()
    x = torch.randn(1, 8200, DIM)
    segments = torch.zeros(1, 8200, dtype=torch.long)
    segments[:, 8192:] = 1
    with torch.no_grad():
        packed = layer(x, Context(positions_of(segments, segments, None)[0])).y[:, 8192:]
        alone = layer(x[:, 8192:], Context(range_positions(8))).y
    torch.testing.assert_close(packed, alone, atol=2e-5, rtol=1e-5)


def test_widths_that_leave_half_a_pair_are_refused() -> None:
    with pytest.raises(ValueError, match=r"state_dim \(6\) must be a multiple of 4"):
        Mamba3Mixer(DIM, HEADS, value_dim=VALUE, state_dim=6)
