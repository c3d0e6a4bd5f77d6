"""Hard concrete gates: their distribution and penalty, one draw for each step, and outputs that folding keeps."""

import pytest
import torch
from torch import nn

import manyformer as mf
from manyformer.analysis.contracts.trial import ContractTrial
from manyformer.analysis.own_models import OwnSubject, build_tiny
from manyformer.base.errors import UserError
from manyformer.config import AdamWConfig
from manyformer.nn.attention.head_gates import HardConcreteGates, attach_gates, attention_heads, fold_gates
from manyformer.nn.runtime.training_hooks import set_training_progress
from manyformer.training.engine import TrainingEngine, set_learning_rate
from manyformer.training.optimizers import make_optimizer
from manyformer.training.process_group import DDPStrategy


def gates_of(model: nn.Module) -> list[HardConcreteGates]:
    return [module for module in model.modules() if isinstance(module, HardConcreteGates)]


@torch.no_grad()
def test_the_distribution_has_the_published_probabilities() -> None:
    """The share of closed gates among many draws is that of the penalty's formula, 0.058 at log alpha 2."""
    gates = HardConcreteGates(200_000, weight=1.0, lr_scale=1.0)
    gates.set_progress(0.0)
    values = gates.values()
    assert float((values == 0).float().mean()) == pytest.approx(0.058, abs=0.002)
    assert float((values == 1).float().mean()) == pytest.approx(0.770, abs=0.004)
    assert float(1 - gates.open_probability()[0]) == pytest.approx(0.058, abs=0.001)
    gates.log_alpha.fill_(-1.0)
    assert float((gates.values() > 0).float().mean()) == pytest.approx(float(gates.open_probability()[0]), abs=0.004)


def test_gates_in_evaluation_are_fixed() -> None:
    gates = HardConcreteGates(3, weight=1.0, lr_scale=1.0).eval()
    with torch.no_grad():
        gates.log_alpha.copy_(torch.tensor([-3.0, 0.0, 3.0]))
    torch.testing.assert_close(gates.values(), torch.tensor([0.0, 0.5, 1.0]))


def test_gates_are_drawn_once_for_each_step() -> None:
    model = build_tiny("universal-transformer-lm", {}, 0)
    attach_gates(model, penalty=0.1, part=None, lr_scale=1.0)
    (gates,) = gates_of(model.train())
    set_training_progress(model, 0.0)
    first = gates.values()
    assert torch.equal(gates.values(), first)
    set_training_progress(model, 0.1)
    assert not torch.equal(gates.values(), first)


@pytest.mark.parametrize("recipe", ["transformer", "universal-transformer-lm"])
def test_the_penalty_is_that_of_a_layer_however_often_it_is_applied(recipe: str) -> None:
    model = build_tiny(recipe, {}, 0)
    subject = OwnSubject(model)
    trial = ContractTrial(subject, torch.Generator().manual_seed(1), 12, 12, None, 1e-9)
    inputs = trial.draw(2, 12)
    batch = subject.task.batch(model, inputs, inputs.tokens)
    optim = AdamWConfig(max_grad_norm=None)
    extra = float(TrainingEngine(model, optim, DDPStrategy()).step([batch], 0.0).figures[1])
    attach_gates(model, penalty=0.3, part=None, lr_scale=1.0)
    engine = TrainingEngine(model, optim, DDPStrategy())
    layers = attention_heads(model)
    expected = 0.3 * sum(float(gates.open_probability().detach().sum()) for gates in gates_of(model)) / len(layers)
    initial = [gates.log_alpha.detach().clone() for gates in gates_of(model)]
    assert float(engine.step([batch], 0.1).figures[1]) == pytest.approx(extra + expected, rel=1e-4)
    assert not any(map(torch.equal, initial, (gates.log_alpha for gates in gates_of(model))))


def test_log_alpha_has_a_learning_rate_of_its_own_and_no_weight_decay() -> None:
    model = build_tiny("transformer-lm", {}, 0)
    attach_gates(model, penalty=0.3, part=None, lr_scale=50.0)
    optimizer = make_optimizer(model, AdamWConfig(lr=1e-3, weight_decay=0.1))
    set_learning_rate(optimizer, 0.01)
    groups = {id(weight): group for group in optimizer.param_groups for weight in group["params"]}
    for gates in gates_of(model):
        assert groups[id(gates.log_alpha)]["weight_decay"] == 0
        assert groups[id(gates.log_alpha)]["lr"] == 0.5
    assert {group["lr"] for group in optimizer.param_groups} == {0.01, 0.5}


@pytest.mark.parametrize("recipe", ["transformer", "etc", "longformer", "collaborative", "synthesizer", "reformer"])
def test_folded_gates_keep_the_outputs(recipe: str) -> None:
    model = build_tiny(recipe, {}, 0).double().eval()
    attach_gates(model, penalty=0.3, part=None, lr_scale=1.0)
    with torch.no_grad():
        for gates in gates_of(model):
            gates.log_alpha.copy_(torch.tensor([0.4, -5.0]))
    subject = OwnSubject(model)
    trial = ContractTrial(subject, torch.Generator().manual_seed(1), 16, 16, None, 1e-9)
    inputs = trial.draw(2, trial.round_length(16))
    with torch.no_grad():
        expected = subject(inputs).logits
        log_alpha = fold_gates(model).log_alpha
        torch.testing.assert_close(subject(inputs).logits, expected, rtol=1e-9, atol=1e-9)
    assert gates_of(model) == []
    assert set(log_alpha) == set(attention_heads(model))
    assert all(values == pytest.approx([0.4, -5.0]) for values in log_alpha.values())


def test_heads_that_share_keys_share_a_gate() -> None:
    model = mf.build("compose", vocab=7, dim=16, heads=4, kv_heads=2, depth=1)
    attach_gates(model, penalty=1.0, part="body", lr_scale=1.0)
    (gates,) = gates_of(model.eval())
    assert gates.log_alpha.shape == (2,)
    assert gates.values().shape == (4,)
    assert float(gates.penalty().detach()) == pytest.approx(4 * float(gates.open_probability().detach()[0]))


def test_unknown_parts_are_refused() -> None:
    model = build_tiny("transformer", {}, 0)
    with pytest.raises(UserError, match="there is no part 'encodr' with attention heads; did you mean encoder"):
        attach_gates(model, penalty=1.0, part="encodr", lr_scale=1.0)
    with pytest.raises(UserError, match="no layer in which an output projection joins attention heads"):
        attach_gates(build_tiny("fnet", {}, 0), penalty=1.0, part=None, lr_scale=1.0)
