"""Importance, ablation and integrated gradients of heads equal what one head at a time gives."""

from typing import Any

import pytest
import torch

from manyformer.analysis.heads.head_importance import (
    ablate_heads,
    head_importance,
    integrated_gate_gradients,
    normalize_layers,
)
from manyformer.analysis.own_models import build_tiny
from manyformer.base.errors import UserError
from manyformer.nn.attention.head_gates import attention_heads, gated_heads
from manyformer.nn.batches import CausalLMBatch, Seq2SeqBatch

TEXT = torch.tensor([[1, 7, 3, 9, 4], [1, 8, 8, 5, 2], [1, 3, 6, 7, 7]])
BATCHES: dict[str, Any] = {
    "transformer-lm": CausalLMBatch(TEXT[:, :-1], TEXT[:, 1:]),
    "linear-transformer": CausalLMBatch(TEXT[:, :-1], TEXT[:, 1:]),
    "reformer": CausalLMBatch(TEXT[:, :-1], TEXT[:, 1:]),
    "transformer": Seq2SeqBatch(TEXT.flip(1), TEXT[:, :-1], TEXT[:, 1:]),
}


def tiny(name: str) -> Any:
    return build_tiny(name, {}, 0).double().eval()


def row(batch: Any, number: int) -> Any:
    return type(batch)(*(None if part is None else part[number : number + 1] for part in batch))


@pytest.mark.parametrize("name", BATCHES)
def test_importance_is_the_mean_of_absolute_derivatives_of_rows(name: str) -> None:
    model, batch = tiny(name), BATCHES[name]
    expected = {part: torch.zeros(layer.heads).double() for part, layer in attention_heads(model).items()}
    step = 1e-5
    for number in range(len(TEXT)):
        for part, layer in attention_heads(model).items():
            for head in range(layer.heads):
                losses = []
                for gate in (1 + step, 1 - step):
                    gates = torch.ones(layer.heads).double()
                    gates[head] = gate
                    with gated_heads(model, {part: gates}), torch.no_grad():
                        losses.append(float(model.loss(row(batch, number)).total))
                expected[part][head] += abs(losses[0] - losses[1]) / (2 * step) / len(TEXT)
    importance = head_importance(model, [batch])
    assert importance.keys() == expected.keys()
    for part in expected:
        torch.testing.assert_close(importance[part], expected[part], rtol=1e-4, atol=1e-7)
    # of several batches the rows are averaged, not the batches
    split = head_importance(model, [row(batch, 0), type(batch)(*(None if p is None else p[1:] for p in batch))])
    for part in expected:
        torch.testing.assert_close(split[part], importance[part])
    assert all(parameter.grad is None for parameter in model.parameters())


def test_normalized_layers_have_length_one() -> None:
    normalized = normalize_layers({"a": torch.tensor([3.0, 4.0]), "b": torch.zeros(2)})
    assert normalized["a"].tolist() == pytest.approx([0.6, 0.8])
    assert normalized["b"].tolist() == [0, 0]


def test_ablation_is_the_change_without_the_head() -> None:
    model, batch = tiny("transformer"), BATCHES["transformer"]

    def loss() -> float:
        with torch.no_grad():
            return float(model.loss(batch).total)

    calls: list[int] = []
    changes = ablate_heads(model, loss, on_head=lambda: calls.append(1))
    before = loss()
    assert len(calls) == sum(layer.heads for layer in attention_heads(model).values())
    cross = model.decoder.get_submodule("0.cross.inner")
    with torch.no_grad():
        # without its output a head is as if its columns of the output projection were zero
        cross.out_proj.weight[:, : cross.out_proj.in_features // 2] = 0
    assert float(changes["decoder.0.cross"][0]) == pytest.approx(loss() - before, abs=1e-12)
    assert abs(loss() - before) > 1e-4


@pytest.mark.parametrize(("name", "keywords"), [("transformer", {"norm_order": "pre"}), ("transformer-lm", {})])
def test_integrated_gradients_add_up_to_the_change_of_the_output(name: str, keywords: dict[str, Any]) -> None:
    model, batch = build_tiny(name, keywords, 0).double().eval(), BATCHES[name]

    def mean_loss() -> torch.Tensor:
        loss = model.loss(batch)
        return loss.total / loss.targets

    values = integrated_gate_gradients(model, mean_loss)
    closed = {part: torch.zeros(layer.heads) for part, layer in attention_heads(model).items()}
    with torch.no_grad():
        difference = float(mean_loss())
        with gated_heads(model, closed):
            difference -= float(mean_loss())
    assert abs(difference) > 0.1
    assert abs(float(sum(layer.sum() for layer in values.values())) - difference) <= 1e-3
    # the output is no straight line, of which the derivatives at its end would do
    open_gates = {part: torch.nn.Parameter(torch.ones(len(layer))) for part, layer in values.items()}
    with gated_heads(model, open_gates):
        mean_loss().backward()
    derivative = sum(float(gate.grad.sum()) for gate in open_gates.values() if gate.grad is not None)
    assert abs(derivative - difference) > 0.01


def test_a_model_without_heads_is_refused() -> None:
    with pytest.raises(UserError, match="fnet has no attention heads"):
        head_importance(build_tiny("fnet", {}, 0), [])
