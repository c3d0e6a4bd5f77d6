"""Columns of tools that change linear layers: adapters, parametrizations, masks and quantized weights."""

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune
from torch.nn.utils.parametrizations import weight_norm

from manyformer.models.with_early_exit import find_early_exits
from other_tools.comparisons import WrongResult, compare, compare_halves
from other_tools.subject import Subject, ToolLimit, ToolMissing, decoded_of, decodes, one_pass


def linears(model: nn.Module) -> dict[str, nn.Linear]:
    """The linear layers by name."""
    return {name: module for name, module in model.named_modules() if type(module) is nn.Linear}


def by_lora(model: Any) -> Callable[[], Any]:
    """peft's adapters on all linear layers, with values; returns what merges them."""
    import peft

    config = peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    adapted = peft.get_peft_model(model, config)
    adapted.to(next(model.parameters()).dtype)
    merge: Callable[[], Any] = adapted.merge_and_unload
    return merge


def by_weight_norm(model: Any) -> Callable[[], Any]:
    """`weight_norm` on all linear layers, with other norms; returns what merges them."""
    layers = linears(model).values()
    for layer in layers:
        weight_norm(layer)
        with torch.no_grad():
            layer.parametrizations.weight.original0.mul_(1.3)  # type: ignore[operator, union-attr]

    def merge() -> Any:
        for layer in layers:
            parametrize.remove_parametrizations(layer, "weight")
        return model

    return merge


def by_pruning(model: Any) -> Callable[[], Any]:
    """Masks on all linear layers; returns what makes them permanent."""
    layers = linears(model).values()
    for layer in layers:
        prune.random_unstructured(layer, "weight", 0.4)

    def merge() -> Any:
        for layer in layers:
            prune.remove(layer, "weight")
        return model

    return merge


def wrapped(change: Callable[[Any], Callable[[], Any]]) -> Callable[[Subject], None]:
    """A column: changed layers act in one pass, in single tokens and, merged, in the plain model alike."""

    def column(subject: Subject) -> None:
        # a change at random makes roundings of single precision greater than what is compared
        model: Any = subject.model().double()
        _check_linears(model)
        example = subject.example(model)
        plain = one_pass(model, example)
        torch.manual_seed(0)
        merge = change(model)
        model.eval()
        logits = one_pass(model, example)
        _check_effect(logits, plain)
        if decodes(model):
            compare(decoded_of(model, example), logits, "single tokens")
        compare(one_pass(merge().eval(), example), logits, "the merged model")

    column.__doc__ = change.__doc__
    return column


def lora(subject: Subject) -> None:
    """peft's adapters on all linear layers."""
    if importlib.util.find_spec("peft") is None:
        raise ToolMissing("peft is not installed")
    wrapped(by_lora)(subject)


def quantized(subject: Subject) -> str | None:
    """Dynamic quantization of linear layers; activations are scaled by those of a call, so that calls are compared."""
    model: Any = subject.model()
    _check_linears(model)
    # rows that exit after different layers would be scaled together, or not
    example = subject.example(model, rows=1)
    plain = one_pass(model, example)
    changed: Any = torch.ao.quantization.quantize_dynamic(model, {nn.Linear})
    logits = one_pass(changed, example)
    _check_effect(logits, plain)
    _check_size(logits, plain)
    if not decodes(model):
        return None
    steps = decoded_of(changed, example)
    calls = decoded_of(changed, example, by_forward=True)
    if find_early_exits(model) is None:
        compare(steps, calls, "single tokens")
        return None
    compare_halves(steps, calls, "single tokens")
    return "single tokens to a tenth of the norm: what is scaled together depends on where tokens exit"


def quantized_by_torchao(subject: Subject) -> None:
    """int8 weights by torchao, which are those of any call."""
    if importlib.util.find_spec("torchao") is None:
        raise ToolMissing("torchao is not installed")
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model: Any = subject.model()
    _check_linears(model)
    example = subject.example(model)
    if any(layer.in_features == 1 for layer in linears(model).values()):
        raise ToolLimit("torchao's int8 weights take no linear layer of one input")
    plain = one_pass(model, example)
    quantize_(model, Int8WeightOnlyConfig())
    logits = one_pass(model, example)
    _check_effect(logits, plain)
    _check_size(logits, plain)
    if decodes(model):
        compare(decoded_of(model, example), logits, "single tokens")


def _check_linears(model: nn.Module) -> None:
    """Raise ToolLimit for a model without what these tools change."""
    if not linears(model):
        raise ToolLimit("there is no linear layer to change")


def _check_effect(logits: Tensor, plain: Tensor) -> None:
    """Raise WrongResult if a change of all linear layers changes nothing."""
    if torch.equal(logits, plain):
        raise WrongResult("the change has no effect")


def _check_size(logits: Tensor, plain: Tensor) -> None:
    """Raise WrongResult if a change of the digits of weights changes more than half of the logits' size."""
    found, expected = (torch.where(torch.isinf(x), 0.0, x) for x in (logits, plain))
    share = (found - expected).norm() / expected.norm()
    # a choice of experts or of a layer may be another one
    if not share < 0.5:
        raise WrongResult(f"{share:.2f} of the norm apart")


COLUMNS = {
    "LoRA": lora,
    "weight_norm": wrapped(by_weight_norm),
    "pruning": wrapped(by_pruning),
    "quantization": quantized,
    "torchao": quantized_by_torchao,
}
