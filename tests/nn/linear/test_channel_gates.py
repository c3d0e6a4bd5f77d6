"""Gates for each feature channel, as in Gated Linear Attention (Yang et al. 2024), through the linear kernel."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from layouts import LAYOUTS, LENGTH, ROWS, apart, differentiated, in_steps, place_of, real_of, tensors
from manyformer.nn import Attention, KernelCall, LinearKernel
from manyformer.nn.core import Context
from manyformer.nn.linear import EluPlusOneFeatures, linear_attention, matrix_recurrence
from manyformer.nn.linear.memory_rules import MemoryResult, MemoryRule, RecurrenceForm, RecurrentMemory, TokenFeatures
from manyformer.nn.masks import Causal
from manyformer.nn.positions import NoPosition

HEADS, KEY, VALUE = 4, 6, 5


class ChannelGatedRule(MemoryRule):
    """M_t = diag(g_t) M_(t-1) + c_t v_t^T, y_t = M_t^T a_t; equation 4 of the paper."""

    gate_dim = KEY
    forms = frozenset({"quadratic", "chunked", "recurrent"})

    def forward(
        self, tokens: TokenFeatures, memory: RecurrentMemory, *, form: RecurrenceForm, chunk: int, floor: float
    ) -> MemoryResult:
        assert tokens.gate is not None
        a, c, v, decay = tokens.query_features, tokens.key_features, tokens.v, F.logsigmoid(tokens.gate)
        if tokens.valid is not None:
            decay, v = (x.masked_fill(~tokens.valid[:, None, :, None], 0.0) for x in (decay, v))
        if form == "quadratic":
            y, matrix, weights = linear_attention.quadratic(a, c, v, decay, tokens.run)
            return MemoryResult(y, RecurrentMemory(matrix), weights)
        if form == "chunked":
            y, matrix = linear_attention.chunked(a, c, v, decay, tokens.run, memory.matrix, chunk=chunk)
        else:
            y, matrix = matrix_recurrence.recurrent(a, c, v, decay, tokens.run, memory.matrix)
        return MemoryResult(y, RecurrentMemory(matrix))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_form_of_gated_linear_attention_is_the_definition(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix_recurrence, "MIN_CHUNK", 3)
    place, real = place_of(layout), real_of(layout)
    qkv = tensors(HEADS, 2, KEY, VALUE + KEY)
    grad_output = torch.randn(ROWS, HEADS, LENGTH, VALUE, dtype=torch.float64) * real
    results = {}
    for path in ("quadratic", "chunked", "recurrent"):
        kernel = LinearKernel(EluPlusOneFeatures(), Causal(), rule=ChannelGatedRule(), chunk=8, path=path)
        results[path] = differentiated(kernel(KernelCall(*qkv, place, place, NoPosition())).y * real, grad_output, qkv)
    assert apart(results["quadratic"], results["recurrent"]) < 1e-10
    assert apart(results["chunked"], results["recurrent"]) < 1e-10


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gated_linear_attention_continues_from_its_state(layout: str) -> None:
    kernel = LinearKernel(EluPlusOneFeatures(), Causal(), rule=ChannelGatedRule(), chunk=4)
    q, k, v = (x.detach() for x in tensors(HEADS, 2, KEY, VALUE + KEY))
    place, state, outputs = place_of(layout), kernel.init_state(ROWS, device=q.device, dtype=q.dtype), []
    for part, at in in_steps(layout, [5, 1, 9, 8]):
        call = KernelCall(q[:, :, part], k[:, :, part], v[:, :, part], at, at, NoPosition(), state)
        y, state, _ = kernel(call)
        outputs.append(y)
    expected, real = kernel(KernelCall(q, k, v, place, place, NoPosition())).y, real_of(layout)
    assert apart((torch.cat(outputs, 2) * real,), (expected * real,)) < 1e-10


def leaves(length: int) -> list[Tensor]:
    return [torch.randn(2, 3, length, n, dtype=torch.float64) for n in (4, 4, 5)]


def test_one_decay_is_the_same_decay_in_each_channel() -> None:
    a, c, v = leaves(20)
    decay = -torch.rand(2, 3, 20, 1, dtype=torch.float64)
    for form in (linear_attention.quadratic, linear_attention.chunked, matrix_recurrence.recurrent):
        one, channels = (form(a, c, v, x)[:2] for x in (decay, decay.expand(-1, -1, -1, 4)))
        torch.testing.assert_close(channels, one, atol=1e-12, rtol=1e-12)


def test_the_strongest_decay_neither_overflows_nor_stops_the_gradient() -> None:
    """exp(-total) of a single chunk would be infinite."""
    a, c, v = leaves(64)
    decay = (-100 * torch.rand(2, 3, 64, 4, dtype=torch.float64)).requires_grad_()
    results = []
    for form in (matrix_recurrence.recurrent, linear_attention.chunked):
        y, memory = form(a, c, v, decay)
        results.append((y, memory, *torch.autograd.grad(y.square().sum() + memory.sum(), decay)))
    assert all(x.isfinite().all() for x in results[1])
    torch.testing.assert_close(results[1], results[0], atol=1e-10, rtol=1e-10)


def test_an_attention_layer_projects_and_caches_as_many_gates_as_the_rule_needs() -> None:
    layer = Attention(24, HEADS, LinearKernel(EluPlusOneFeatures(), Causal(), rule=ChannelGatedRule()))
    assert layer.kv_proj.out_features == 24 + HEADS * (6 + KEY)
    place = place_of("plain")
    x = torch.randn(ROWS, LENGTH, 24)
    assert layer(x, Context(place)).y.shape == x.shape
