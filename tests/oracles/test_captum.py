"""Integrated gradients of the gates of heads against captum's."""

from typing import Any

import pytest
import torch
from torch import Tensor

from manyformer.analysis.heads.head_importance import integrated_gate_gradients
from manyformer.analysis.own_models import build_tiny
from manyformer.nn.attention.head_gates import ConstantGates, attention_heads
from manyformer.nn.batches import CausalLMBatch

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]


def test_integrated_gradients_of_gates_are_captums() -> None:
    captum = pytest.importorskip("captum.attr", reason="captum is missing: pip install 'manyformer[test]'")
    model: Any = build_tiny("transformer-lm", {}, 0).double().eval()
    tokens = torch.randint(5, 20, (3, 9), generator=torch.Generator().manual_seed(0))
    batch, layers = CausalLMBatch(tokens[:, :-1], tokens[:, 1:]), attention_heads(model)

    def mean_loss() -> Tensor:
        loss = model.loss(batch)
        return loss.total / loss.targets

    def loss_with(gates: Tensor) -> Tensor:
        for layer, values in zip(layers.values(), gates[0].split([layer.heads for layer in layers.values()])):
            layer.head_gates = ConstantGates(values)
        loss = mean_loss()
        for layer in layers.values():
            layer.head_gates = None
        return loss[None]

    values = integrated_gate_gradients(model, mean_loss, tolerance=1e-7)
    open_gates = torch.ones(1, sum(map(len, values.values())), dtype=torch.float64)
    settings = {"method": "gausslegendre", "n_steps": 32, "internal_batch_size": 1}
    expected = captum.IntegratedGradients(loss_with).attribute(open_gates, **settings)
    assert expected.abs().min() > 0.01
    torch.testing.assert_close(torch.cat(list(values.values())), expected[0], rtol=1e-4, atol=1e-6)
