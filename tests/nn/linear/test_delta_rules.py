"""Rules after the gated delta rule against their formulas, one document, head and token at a time."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from layouts import LAYOUTS, LENGTH, ROWS, apart, differentiated, documents_of, place_of, real_of
from manyformer.nn.linear.decay_gates import SoftplusDecay
from manyformer.nn.linear.delta_rules import EraseWriteRule, FeedbackDeltaRule, HouseholderProductRule
from manyformer.nn.linear.memory_rules import MemoryRule, RecurrenceForm, RecurrentMemory, TokenFeatures
from manyformer.nn.linear.recurrent_rules import GatedDeltaRule, GateProjections
from manyformer.nn.ops.document_rows import NO_SEGMENT, segment_runs
from manyformer.nn.runtime.head_selection import HeadProjection

HEADS, R, W, STEPS = 2, 4, 3, 3

Formula = Callable[[MemoryRule, Tensor, Tensor, Tensor, Tensor], Tensor]
"""The outputs (h, l, f) of a document of queries, keys, values and gates (h, l, .)."""


def projections(**widths: int) -> GateProjections:
    """Projections that no test here calls: the rules are given their gates."""
    return GateProjections(**{name: HeadProjection(6, HEADS, width) for name, width in widths.items()})


def product_rule(steps: int = STEPS, max_strength: float = 2.0) -> HouseholderProductRule:
    gates = projections(decay=1, strength=steps)
    return HouseholderProductRule(
        SoftplusDecay(HEADS), gates, steps=steps, key_dim=R, value_dim=W, max_strength=max_strength
    )


def product_formula(rule: MemoryRule, q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
    """Products of matrices I - b k k^T, the decay once a token."""
    assert isinstance(rule, HouseholderProductRule)
    outputs = []
    keys = torch.cat([gate[..., 1 + STEPS : 1 + STEPS + (STEPS - 1) * R], k], -1)
    values = torch.cat([gate[..., 1 + STEPS + (STEPS - 1) * R :], v], -1)
    for h in range(HEADS):
        memory = q.new_zeros(R, W)
        for i in range(q.shape[1]):
            rate = rule.decay.a_log[h].exp()  # type: ignore[operator,union-attr]
            step = torch.log1p((gate[h, i, 0] + rule.decay.dt_bias[h]).exp())  # type: ignore[operator,index]
            memory = (-rate * step).exp() * memory
            for j in range(rule.steps):
                key = keys[h, i, j * R : (j + 1) * R]
                key = key / (key.square().sum() + 1e-6).sqrt()
                b = rule.max_strength / (1 + (-gate[h, i, 1 + j]).exp())
                transition = torch.eye(R, dtype=q.dtype) - b * torch.outer(key, key)
                memory = transition @ memory + b * torch.outer(key, values[h, i, j * W : (j + 1) * W])
            outputs.append(memory.T @ q[h, i])
    return torch.stack(outputs).view(HEADS, -1, W)


def erase_write_rule(max_strength: float = 2.0) -> EraseWriteRule:
    gates = projections(decay=R, erase=R, write=W)
    return EraseWriteRule(SoftplusDecay(HEADS, R), gates, key_dim=R, value_dim=W, max_strength=max_strength)


def erase_write_formula(rule: MemoryRule, q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
    """Equations of the paper with matrices; the memory is read after it has decayed."""
    assert isinstance(rule, EraseWriteRule)
    outputs = []
    biases = rule.decay.dt_bias.view(HEADS, R)  # type: ignore[operator,union-attr]
    for h in range(HEADS):
        memory = q.new_zeros(R, W)
        for i in range(q.shape[1]):
            steps = torch.log1p((gate[h, i, :R] + biases[h]).exp())
            decayed = torch.diag((-rule.decay.a_log[h].exp() * steps).exp()) @ memory  # type: ignore[operator,index,union-attr]
            erase = rule.max_strength / (1 + (-gate[h, i, R : 2 * R]).exp())
            write = 1 / (1 + (-gate[h, i, 2 * R :]).exp())
            transition = torch.eye(R, dtype=q.dtype) - torch.outer(k[h, i], erase * k[h, i])
            memory = transition @ decayed + torch.outer(k[h, i], write * v[h, i])
            outputs.append(memory.T @ q[h, i])
    return torch.stack(outputs).view(HEADS, -1, W)


def feedback_rule() -> FeedbackDeltaRule:
    rule = FeedbackDeltaRule(HEADS, projections(decay=1, strength=1))
    with torch.no_grad():
        rule.feedback.copy_(torch.tensor([-1.0, 0.5]))
        rule.correction.copy_(torch.tensor([0.7, -0.3]))
    return rule


def feedback_formula(rule: MemoryRule, q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
    """The formula of the paper, with p and without another form of the delta rule."""
    assert isinstance(rule, FeedbackDeltaRule)
    outputs = []
    for h in range(HEADS):
        memory = q.new_zeros(R, W)
        for i in range(q.shape[1]):
            p = k[h, i] / (1 + (-rule.feedback[h]).exp())
            steps = torch.log1p((gate[h, i, 0] + rule.decay.dt_bias[h]).exp())
            memory = (-rule.decay.a_log[h].exp() * steps).exp() * memory
            error = v[h, i] - memory.T @ p
            memory = memory + torch.outer(k[h, i], error) / (1 + (-gate[h, i, 1]).exp())
            outputs.append(memory.T @ (q[h, i] - rule.correction[h] * p / R**0.5))
    return torch.stack(outputs).view(HEADS, -1, W)


RULES: dict[str, tuple[Callable[[], MemoryRule], Formula, tuple[int, int, int, int]]] = {
    "feedback": (feedback_rule, feedback_formula, (R, R, W, 2)),
    "erase and write": (erase_write_rule, erase_write_formula, (R, R, W, 2 * R + W)),
    "product": (product_rule, product_formula, (R, R, W, 1 + STEPS + (STEPS - 1) * (R + W))),
}
"""Each rule, its formula, and the widths of queries, keys, values and gates."""


def make(name: str) -> tuple[MemoryRule, Formula, list[Tensor]]:
    torch.manual_seed(0)
    make_rule, formula, widths = RULES[name]
    rule = make_rule().double()
    inputs = [torch.randn(ROWS, HEADS, LENGTH, n, dtype=torch.float64) for n in widths]
    if name != "product":
        inputs[1] = F.normalize(inputs[1], dim=-1)
    return rule, formula, [x.requires_grad_() for x in inputs]


@pytest.mark.parametrize("form", ["chunked", "recurrent"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", RULES)
def test_both_forms_are_the_formula_with_its_gradients(name: str, layout: str, form: RecurrenceForm) -> None:
    rule, formula, inputs = make(name)
    q, k, v, gate = inputs
    run, valid, _ = segment_runs(place_of(layout).segment_ids, torch.full((ROWS,), NO_SEGMENT))
    tokens = TokenFeatures(q, k, v, None, gate, valid, run)
    y = rule(tokens, RecurrentMemory(), form=form, chunk=5, floor=0.0).y
    expected = torch.zeros_like(y)
    for row, columns in documents_of(layout):
        document = formula(rule, *(x[row][:, columns] for x in inputs))
        expected = expected.index_put((torch.tensor(row), torch.arange(HEADS)[:, None], columns), document)
    real = real_of(layout)
    own = [parameter for path, parameter in rule.named_parameters() if not path.startswith("gate_projection")]
    leaves = [*inputs, *own]
    grad_output = torch.randn_like(y) * real
    actual = differentiated(y * real, grad_output, leaves)
    assert apart(actual, differentiated(expected, grad_output, leaves)) < 1e-11
    # a gate, or a number of a head, without a gradient would not be learned
    assert all(grad.any() for grad in actual[1:])


@pytest.mark.parametrize("name", RULES)
def test_a_document_in_pieces_is_the_document(name: str) -> None:
    rule, _, inputs = make(name)
    parts: list[Tensor] = []
    memory = RecurrentMemory()
    with torch.no_grad():
        for begin, end in ((0, 7), (7, 8), (8, 9), (9, LENGTH)):
            q, k, v, gate = (x[:, :, begin:end] for x in inputs)
            form: RecurrenceForm = "recurrent" if end - begin == 1 else "chunked"
            tokens = TokenFeatures(q, k, v, None, gate, None, None)
            y, memory, _ = rule(tokens, memory, form=form, chunk=4, floor=0.0)
            parts.append(y)
        q, k, v, gate = inputs
        whole = TokenFeatures(q, k, v, None, gate, None, None)
        expected, last, _ = rule(whole, RecurrentMemory(), form="chunked", chunk=64, floor=0.0)
    torch.testing.assert_close(torch.cat(parts, 2), expected, atol=1e-12, rtol=0)
    torch.testing.assert_close(memory.matrix, last.matrix, atol=1e-12, rtol=0)


def test_one_step_of_a_product_is_the_gated_delta_rule() -> None:
    _, _, (q, k, v, gate) = make("product")
    rule = product_rule(steps=1).double()
    older = GatedDeltaRule(SoftplusDecay(HEADS), projections(decay=1, strength=1), max_strength=2.0).double()
    older.load_state_dict(rule.state_dict())
    tokens = TokenFeatures(q, k, v, None, gate[..., :2], None, None)
    lengths = (k.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    options = {"form": "chunked", "chunk": 8, "floor": 0.0}
    y = rule(tokens, RecurrentMemory(), **options).y  # type: ignore[arg-type]
    expected = older(tokens._replace(key_features=k / lengths), RecurrentMemory(), **options).y  # type: ignore[arg-type]
    torch.testing.assert_close(y, expected, atol=1e-12, rtol=0)


def test_one_gate_for_all_channels_is_kimi_delta_attention() -> None:
    _, _, (q, k, v, gate) = make("erase and write")
    rule = erase_write_rule(max_strength=1.0).double()
    older = GatedDeltaRule(SoftplusDecay(HEADS, R), projections(decay=R, strength=1)).double()
    older.decay.load_state_dict(rule.decay.state_dict())  # type: ignore[union-attr]
    decay_gate, strength_gate = gate[..., :R], gate[..., R : R + 1]
    same = torch.cat([decay_gate, strength_gate.expand(-1, -1, -1, R + W)], -1)
    tokens = TokenFeatures(q, k, v, None, torch.cat([decay_gate, strength_gate], -1), None, None)
    options = {"form": "chunked", "chunk": 8, "floor": 0.0}
    y = rule(tokens._replace(gate=same), RecurrentMemory(), **options).y  # type: ignore[arg-type]
    expected = older(tokens, RecurrentMemory(), **options).y  # type: ignore[arg-type]
    torch.testing.assert_close(y, expected, atol=1e-12, rtol=0)


def test_full_feedback_without_a_correction_of_queries_is_the_gated_delta_rule() -> None:
    _, _, (q, k, v, gate) = make("feedback")
    rule = feedback_rule().double()
    with torch.no_grad():
        rule.feedback.fill_(60.0)
        rule.correction.zero_()
    older = GatedDeltaRule(SoftplusDecay(HEADS), projections(decay=1, strength=1)).double()
    older.decay.load_state_dict(rule.decay.state_dict())  # type: ignore[union-attr]
    tokens = TokenFeatures(q, k, v, None, gate, None, None)
    options = {"form": "chunked", "chunk": 8, "floor": 0.0}
    y = rule(tokens, RecurrentMemory(), **options).y  # type: ignore[arg-type]
    expected = older(tokens, RecurrentMemory(), **options).y  # type: ignore[arg-type]
    torch.testing.assert_close(y, expected, atol=1e-12, rtol=0)


def test_two_steps_rotate_a_memory_and_one_cannot() -> None:
    """Two reflections whose keys are 45 degrees apart turn the memory by 90; one changes its determinant's sign."""
    rule = product_rule(steps=2).double()
    with torch.no_grad():
        # without a decay worth mentioning
        rule.decay.dt_bias.fill_(-60.0)  # type: ignore[operator,union-attr]
    memory = torch.zeros(1, HEADS, R, W, dtype=torch.float64)
    memory[..., :2, :2] = torch.eye(2)
    q, last_key, v = (torch.zeros(1, HEADS, 1, n, dtype=torch.float64) for n in (R, R, W))
    last_key[..., :2] = 1.0
    # the decay's gate, full strengths, then key and value of the first step
    gate = torch.tensor([0.0, 60.0, 60.0, 1.0, *[0.0] * (R - 1 + W)], dtype=torch.float64).expand(1, HEADS, 1, -1)
    tokens = TokenFeatures(q, last_key, v, None, gate, None, None)
    turned = rule(tokens, RecurrentMemory(memory), form="recurrent", chunk=8, floor=0.0).memory.matrix
    assert turned is not None
    quarter = torch.tensor([[0.0, 1.0], [-1.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(turned[0, 0, :2, :2].abs(), quarter.abs(), atol=1e-5, rtol=0)
    torch.testing.assert_close(torch.linalg.det(turned[0, 0, :2, :2]), quarter.new_ones(()), atol=1e-5, rtol=0)
