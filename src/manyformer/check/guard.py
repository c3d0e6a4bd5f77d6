"""Leave no trace: what a check changes in a model or in the process, it puts back."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn


@contextmanager
def untouched(module: nn.Module | None) -> Iterator[None]:
    """Evaluation mode inside; afterwards modes, gradients and all random generators are as they were."""
    numbers, others = np.random.get_state(), random.getstate()
    modes = [] if module is None else [(part, part.training) for part in module.modules()]
    grads = [] if module is None else [(weight, weight.grad) for weight in module.parameters()]
    with torch.random.fork_rng():
        try:
            for weight, _ in grads:
                weight.grad = None
            for part, _ in modes:
                part.training = False
            yield
        finally:
            for part, training in modes:
                part.training = training
            for weight, grad in grads:
                weight.grad = grad
            np.random.set_state(numbers)
            random.setstate(others)


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


@contextmanager
def training(module: nn.Module) -> Iterator[None]:
    """Training mode inside, evaluation mode and no gradients after."""
    module.train()
    try:
        yield
    finally:
        module.eval()
        module.zero_grad(set_to_none=True)
