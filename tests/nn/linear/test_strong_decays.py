"""Whole models whose gates are twenty times as strong: float32 adds nothing to what a loop over tokens rounds."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import manyformer as mf
from manyformer.nn import ForgettingKernel, LinearKernel
from manyformer.nn.linear.decay_gates import FixedDecay

GATES = {
    "kda": "rule.gate_projection.decay.up.weight",
    "gated-deltanet": "rule.gate_projection.decay.up.weight",
    "qwen3-next": "rule.gate_projection.decay.up.weight",
    "deltanet": "rule.gate_projection.strength.up.weight",
    "mamba-2": "rule.gate_projection.up.weight",
    "gla": "rule.gate_projection.up.weight",
    "mlstm": "rule.gate_projection.forget.up.weight",
    "rwkv-7": "time_mixing.decay.expand.weight",
    "hgrn2": "inner.kv_proj.weight",
    "fox": "kernel.forget_gate.up.weight",
    "retnet": "rule.decay",
    "lightning": "rule.decay",
}
SIZES = {"vocab": 64, "dim": 64, "depth": 2, "heads": 2, "experts": 4}


def strong_model(recipe: str) -> nn.Module:
    """A tiny model with gates, or constants of heads, multiplied by 20."""
    torch.manual_seed(0)
    parameters = mf.recipes()[recipe].signature.parameters
    model = mf.build(recipe, **{name: size for name, size in SIZES.items() if name in parameters}).eval()
    strengthened = 0
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, FixedDecay) and name.endswith(GATES[recipe]):
                module.log_decay = tuple(20 * decay for decay in module.log_decay)
                strengthened += 1
        for name, parameter in model.named_parameters():
            if name.endswith(GATES[recipe]):
                parameter.mul_(20)
                strengthened += 1
    assert strengthened
    return model


def by_definition(model: nn.Module) -> nn.Module:
    """The same model, token by token or over all pairs."""
    copied = copy.deepcopy(model)
    for module in copied.modules():
        if isinstance(module, LinearKernel):
            module.path = "recurrent"
        elif isinstance(module, ForgettingKernel):
            module.path = "naive"
    return copied


def in_two_calls(model: nn.Module, tokens: Tensor) -> Tensor:
    """The logits of a call with most tokens, and of one with the others that continues it."""
    first = model(tokens[:, :190], state=model.init_state(len(tokens)))  # type: ignore[operator]
    return torch.cat([first.logits, model(tokens[:, 190:], state=first.state).logits], 1)


@torch.no_grad()
@pytest.mark.parametrize("recipe", GATES)
def test_logits_of_strong_gates_are_as_exact_as_by_definition(recipe: str) -> None:
    """Within 5e-6 of the largest logit in float64, or, where norms and normalizers of the model multiply any rounding,
    no further than twice the definition in float32. Sums of decays rounded as one number left 6e-5 to 3e-4."""
    model, tokens = strong_model(recipe), torch.randint(0, 64, (2, 200))
    definition = by_definition(model)
    exact = copy.deepcopy(definition).double()
    expected = exact(tokens).logits

    def error(logits: Tensor) -> float:
        return float((logits.double() - expected).abs().amax() / expected.abs().amax())

    calls: list[Callable[[], Tensor]] = [lambda: model(tokens).logits, lambda: in_two_calls(model, tokens)]
    bound = max(5e-6, 2 * error(definition(tokens).logits))
    for call in calls:
        assert error(call()) < bound
