"""Leave no trace: what a check changes in a model or in the process, it puts back."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

TABLES = ("_parameters", "_buffers", "_modules")


@contextmanager
def untouched(module: nn.Module | None) -> Iterator[None]:
    """Evaluation mode inside; afterwards modes, gradients and all random generators are as they were."""
    numbers, others = np.random.get_state(), random.getstate()
    grads = [] if module is None else [(weight, weight.grad) for weight in module.parameters()]
    devices = {weight.device for weight, _ in grads if weight.device.type == "cuda"}
    with torch.random.fork_rng(devices=list(devices)), unchanged(module):
        try:
            for weight, _ in grads:
                weight.grad = None
            if module is not None:
                module.eval()
            yield
        finally:
            for weight, grad in grads:
                weight.grad = grad
            np.random.set_state(numbers)
            random.setstate(others)


@contextmanager
def unchanged(module: nn.Module | None) -> Iterator[None]:
    """Afterwards every attribute of every part is the same object as before.

    Released models do change themselves when called: BigBird replaces its attention for good once it meets a short row.
    """
    kept: list[tuple[nn.Module, dict[str, Any]]] = []
    for part in () if module is None else list(module.modules()):
        kept.append((part, {name: _hold(name, value) for name, value in vars(part).items()}))
    try:
        yield
    finally:
        for part, attributes in kept:
            vars(part).clear()
            vars(part).update(attributes)


def _hold(name: str, value: Any) -> Any:
    """The value itself, or a copy of the table that lists parts."""
    return value.copy() if name in TABLES else value


@contextmanager
def training(module: nn.Module) -> Iterator[None]:
    """Training mode inside; afterwards evaluation mode, no gradients, and all values as they were."""
    values = {name: value.clone() for name, value in module.state_dict().items()}
    module.train()
    try:
        yield
    finally:
        module.eval()
        module.load_state_dict(values)
        module.zero_grad(set_to_none=True)


@contextmanager
def in_dtype(module: nn.Module | None, dtype: torch.dtype | None) -> Iterator[None]:
    """All floating parameters and buffers in `dtype`, in place, so that closures over the module see it too."""
    kept: list[tuple[Tensor, Tensor]] = []
    if module is not None and dtype is not None:
        tensors = {id(t): t for t in [*module.parameters(), *module.buffers()] if t.is_floating_point()}
        kept = [(tensor, tensor.data) for tensor in tensors.values() if tensor.dtype != dtype]
    try:
        for tensor, data in kept:
            tensor.data = data.to(dtype)
        yield
    finally:
        for tensor, data in kept:
            tensor.grad = None
            tensor.data = data


def working_dtype(module: nn.Module | None, *, exact: bool) -> torch.dtype | None:
    """float64 where the model is known to bear it, float32 for weights in half precision, else what it has."""
    if exact:
        return torch.float64
    if module is not None and any(t.is_floating_point() and t.element_size() < 4 for t in module.parameters()):
        return torch.float32
    return None
