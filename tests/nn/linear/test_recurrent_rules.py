"""The rule of the mLSTM against its formula, which has no levels."""

import pytest
import torch
from torch import Tensor

from layouts import LAYOUTS, LENGTH, ROWS, apart, differentiated, documents_of, place_of, real_of
from manyformer.nn.linear.memory_rules import RecurrenceForm, RecurrentMemory, TokenFeatures
from manyformer.nn.linear.recurrent_rules import GateProjections, MatrixLSTMRule
from manyformer.nn.ops.document_rows import NO_SEGMENT, segment_runs
from manyformer.nn.runtime.head_selection import HeadProjection

HEADS, R, W = 3, 5, 4


def make(gate_cap: float | None = 15.0) -> MatrixLSTMRule:
    gates = GateProjections(input=HeadProjection(6, HEADS, 1), forget=HeadProjection(6, HEADS, 1))
    rule = MatrixLSTMRule(HEADS, gates, gate_cap=gate_cap)
    with torch.no_grad():
        rule.input_bias.zero_()
        rule.forget_bias.uniform_(-1, 1)
    return rule


def written_out(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, rule: MatrixLSTMRule) -> Tensor:
    """One document (h, l, .): equations 19 to 27 of the paper with its gates themselves."""
    bias = torch.stack([rule.input_bias, rule.forget_bias], -1)[:, None]
    gates = gate + bias if rule.gate_cap is None else rule.gate_cap * ((gate + bias) / rule.gate_cap).tanh()
    memory, normalizer, outputs = q.new_zeros(HEADS, R, W), q.new_zeros(HEADS, R), []
    for i in range(q.shape[1]):
        write, keep = gates[:, i, 0].exp(), gates[:, i, 1].sigmoid()
        memory = keep[:, None, None] * memory + write[:, None, None] * k[:, i, :, None] * v[:, i, None]
        normalizer = keep[:, None] * normalizer + write[:, None] * k[:, i]
        divisor = (normalizer * q[:, i]).sum(-1).abs().clamp(min=1.0)
        outputs.append(torch.einsum("hrf,hr->hf", memory, q[:, i]) / divisor[:, None])
    return torch.stack(outputs, 1)


@pytest.mark.parametrize("form", ["quadratic", "chunked", "recurrent"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_forms_are_the_formula_with_its_gradients(layout: str, form: RecurrenceForm) -> None:
    rule, real, place = make().double(), real_of(layout), place_of(layout)
    widths = (R, R, W, 2)
    inputs = [torch.randn(ROWS, HEADS, LENGTH, n, dtype=torch.float64, requires_grad=True) for n in widths]
    q, k, v, gate = inputs
    run, valid, _ = segment_runs(place.segment_ids, torch.full((ROWS,), NO_SEGMENT))
    y, memory, weights = rule(
        TokenFeatures(q, k, v, None, gate, valid, run), RecurrentMemory(), form=form, chunk=5, floor=0.0
    )
    expected = torch.zeros_like(y)
    for row, columns in documents_of(layout):
        document = (x[row][:, columns] for x in inputs)
        expected = expected.index_put(
            (torch.tensor(row), torch.arange(HEADS)[:, None], columns), written_out(*document, rule)
        )
    leaves = [*inputs, rule.input_bias, rule.forget_bias]
    grad_output = torch.randn_like(y) * real
    # the eps beside the normalizer is what is left
    assert apart(differentiated(y * real, grad_output, leaves), differentiated(expected, grad_output, leaves)) < 3e-5
    assert memory.log_scale is not None
    if weights is not None:
        torch.testing.assert_close((weights @ v) * real, y * real, atol=1e-10, rtol=0)


def random_tokens(length: int, gate: Tensor) -> TokenFeatures:
    q, k, v = (torch.randn(1, HEADS, length, n, dtype=torch.float64) for n in (R, R, W))
    return TokenFeatures(q, k, v, None, gate, None, None)


def test_the_level_falls_after_a_large_gate() -> None:
    """With a level that only rises, the newest of 400 tokens after a gate of exp(20) would count 2e-9."""
    rule = make(None)
    gate = torch.zeros(1, HEADS, 400, 2)
    gate[:, :, 0, 0] = 20.0
    tokens = random_tokens(400, gate.double())
    narrow = TokenFeatures(*(x.float() if isinstance(x, torch.Tensor) else x for x in tokens))
    with torch.no_grad():
        y = rule(narrow, RecurrentMemory(), form="chunked", chunk=64, floor=0.0).y
        expected = written_out(*(x[0] for x in (*tokens[:3], gate.double())), rule.double())
    torch.testing.assert_close(y[0].double(), expected, atol=1e-4, rtol=1e-3)


def test_float32_over_8192_tokens_of_strong_decay() -> None:
    """Chunks in float32 against the loop in float64, with 1.6 nats of decay a token and gates up to exp(15)."""
    rule = make()
    gate = torch.randn(1, HEADS, 8192, 2, dtype=torch.float64) * 4
    gate[..., 1] -= 1.4
    tokens = random_tokens(8192, gate)
    # without cancellation in the normalizer, which would multiply any rounding
    tokens = tokens._replace(query_features=tokens.query_features.abs(), key_features=tokens.key_features.abs())
    narrow = TokenFeatures(*(x.float() if isinstance(x, torch.Tensor) else x for x in tokens))
    with torch.no_grad():
        y = rule(narrow, RecurrentMemory(), form="chunked", chunk=64, floor=0.0).y
        expected = rule.double()(tokens, RecurrentMemory(), form="recurrent", chunk=64, floor=0.0).y
    assert float((y - expected).abs().max() / expected.abs().max()) < 1e-5


@pytest.mark.parametrize("forget", [3.0, 4.6, 6.0])
def test_a_level_that_falls_for_thousands_of_tokens_loses_no_digits(forget: float) -> None:
    """After a gate of exp(15) the level falls by less than 0.05 a token, each time rounded by up to 5e-7: what that
    adds up to must not change what old tokens weigh beside new ones."""
    rule = make(None)
    gate = torch.full((1, HEADS, 2000, 2), forget, dtype=torch.float64)
    gate[..., 0] = 0.5
    gate[:, :, 0, 0] = 15.0
    tokens = random_tokens(2000, gate)
    tokens = tokens._replace(query_features=tokens.query_features.abs(), key_features=tokens.key_features.abs())
    narrow = TokenFeatures(*(x.float() if isinstance(x, torch.Tensor) else x for x in tokens))
    with torch.no_grad():
        y = rule(narrow, RecurrentMemory(), form="chunked", chunk=64, floor=0.0).y
        expected = rule.double()(tokens, RecurrentMemory(), form="recurrent", chunk=64, floor=0.0).y
    assert float((y - expected).abs().max() / expected.abs().max()) < 5e-6
