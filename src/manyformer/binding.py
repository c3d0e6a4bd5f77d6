"""Functional forms of modules, bound to their parameters: calling them looks up no attribute, hook or module."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TensorFn = Callable[[Tensor], Tensor]


def has_hooks(module: nn.Module) -> bool:
    """Whether forward hooks are registered, so that the module must be called as a module."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def bind_module(module: nn.Module) -> TensorFn:
    """The function of one of torch's `BINDERS` types with its current parameters; any other module itself."""
    # a subclass may compute something else
    binder = None if has_hooks(module) else BINDERS.get(type(module))
    return module if binder is None else binder(module)


def bind_optional(module: nn.Module | None) -> TensorFn | None:
    """`bind_module`, and None for None."""
    return None if module is None else bind_module(module)


def transposed_copy(weight: Tensor) -> Tensor:
    """The transposed matrix, contiguous: a product with many short rows then takes half as long on a CPU."""
    return weight.t().contiguous()


def bind_rows(weight: Tensor, bias: Tensor | None) -> TensorFn:
    """The linear map of rows (b, d) with these weights."""
    transposed = transposed_copy(weight)
    if bias is None:
        return lambda x: torch.mm(x, transposed)
    return lambda x: torch.addmm(bias, x, transposed)


def _bind_linear(module: nn.Linear) -> TensorFn:
    weight, bias = module.weight, module.bias
    return lambda x: F.linear(x, weight, bias)


def _bind_layer_norm(module: nn.LayerNorm) -> TensorFn:
    shape, weight, bias, eps = module.normalized_shape, module.weight, module.bias, module.eps
    return lambda x: torch.layer_norm(x, shape, weight, bias, eps)


def _bind_rms_norm(module: nn.RMSNorm) -> TensorFn:
    shape, weight, eps = module.normalized_shape, module.weight, module.eps
    return lambda x: torch.rms_norm(x, shape, weight, eps)


def _bind_gelu(module: nn.GELU) -> TensorFn:
    approximate = module.approximate
    return lambda x: F.gelu(x, approximate=approximate)


BINDERS: dict[type[nn.Module], Callable[[Any], TensorFn]] = {
    nn.Linear: _bind_linear,
    nn.LayerNorm: _bind_layer_norm,
    nn.RMSNorm: _bind_rms_norm,
    nn.GELU: _bind_gelu,
    nn.ReLU: lambda module: torch.relu_ if module.inplace else torch.relu,
    nn.SiLU: lambda module: lambda x: F.silu(x, inplace=module.inplace),
}
"""How torch's modules become functions, by their exact type."""
