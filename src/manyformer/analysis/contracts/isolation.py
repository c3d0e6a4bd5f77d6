"""Context managers that restore what a check changes in a model or in the process."""

import math
import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

WITHOUT_GENERATOR = ("cpu", "meta")
"""The devices that draw from the generator of the process, or not at all."""

COPIED_TABLES = ("_parameters", "_buffers", "_modules")

STANDARD_MODULES = sys.stdlib_module_names
"""Modules whose objects hold no tensors of a model."""


@contextmanager
def restoring_model_and_rng(module: nn.Module | None) -> Iterator[None]:
    """Set evaluation mode; on exit restore modes, gradients, attributes and the states of all random generators."""
    numpy_state = np.random.get_state()
    python_state = random.getstate()
    if module is None:
        grads = []
    else:
        grads = [(weight, weight.grad) for weight in module.parameters()]
    with forked_generators(weight.device for weight, _ in grads), restoring_attributes(module):
        try:
            for weight, _ in grads:
                # gradients that were there would be added to those of the contracts
                weight.grad = None
            if module is not None:
                module.eval()
            yield
        finally:
            for weight, grad in grads:
                weight.grad = grad
            np.random.set_state(numpy_state)
            random.setstate(python_state)


def forked_generators(devices: Iterable[torch.device]) -> AbstractContextManager[object]:
    """Restore the generators of the CPU and of these devices, all of one type, at the end of the block."""
    drawing = [device for device in dict.fromkeys(devices) if device.type not in WITHOUT_GENERATOR]
    types = {device.type for device in drawing} or {"cpu"}
    assert len(types) == 1, f"tensors of one model are on {sorted(types)}"
    # torch forks the generators of one type of device, and of the CPU with it
    return torch.random.fork_rng(drawing, device_type=types.pop())


@contextmanager
def restoring_attributes(module: nn.Module | None) -> Iterator[None]:
    """On exit restore every attribute of every submodule to the same object.

    Some released models change themselves when called: BigBird replaces its attention permanently at a short input.
    """
    saved: list[tuple[nn.Module, dict[str, Any]]] = []
    for submodule in () if module is None else list(module.modules()):
        # a scripted module keeps its attributes outside of Python
        if isinstance(submodule, torch.jit.ScriptModule):
            continue
        # dictionaries of parameters, buffers and submodules are copied
        # only these tables are changed in place; other values are replaced, and the old objects are put back
        attributes = {n: v.copy() if n in COPIED_TABLES else v for n, v in vars(submodule).items()}
        saved.append((submodule, attributes))
    try:
        yield
    finally:
        for submodule, attributes in saved:
            vars(submodule).clear()
            vars(submodule).update(attributes)


@contextmanager
def restoring_buffers(module: nn.Module) -> Iterator[None]:
    """On exit restore the values of all tensors that a call in training mode may change: those without gradients."""
    with restoring_values([*module.buffers(), *(w for w in module.parameters() if not w.requires_grad)]):
        yield


@contextmanager
def restoring_values(tensors: Sequence[Tensor]) -> Iterator[None]:
    """On exit restore the values of all tensors, and their shapes where those were changed."""
    values = [tensor.detach().clone() for tensor in tensors]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in zip(tensors, values):
                _restore(tensor, value)


@contextmanager
def restoring_tensors(module: nn.Module) -> Iterator[None]:
    """On exit restore the values of all tensors that a call may change in place: buffers, and plain attributes.

    Caches of released models are often plain tensors, or in lists and objects that a submodule holds.
    """
    tensors = {id(tensor): tensor for tensor in module.buffers()}
    for submodule in module.modules():
        for tensor in _plain_tensors(vars(submodule)):
            tensors[id(tensor)] = tensor
    with restoring_values(list(tensors.values())):
        yield


def _restore(tensor: Tensor, value: Tensor) -> None:
    if tensor.shape == value.shape and tensor.dtype == value.dtype:
        # what was not touched stays as it is: tensors of inference mode cannot be written
        if not torch.equal(tensor, value):
            tensor.copy_(value)
    else:
        tensor.data = value


def _plain_tensors(value: Any, depth: int = 0) -> Iterator[Tensor]:
    """Tensors in attributes, lists, dictionaries and plain objects, a few levels deep; submodules have their own."""
    if isinstance(value, Tensor):
        if not isinstance(value, nn.Parameter):
            yield value
    elif isinstance(value, nn.Module | type) or depth > 3:
        return
    elif isinstance(value, dict):
        for child in list(value.values()):
            yield from _plain_tensors(child, depth + 1)
    elif isinstance(value, list | tuple):
        for child in value:
            yield from _plain_tensors(child, depth + 1)
    elif type(value).__module__ not in STANDARD_MODULES and hasattr(value, "__dict__"):
        yield from _plain_tensors(vars(value), depth + 1)


@contextmanager
def training_mode(module: nn.Module) -> Iterator[None]:
    """Set training mode; on exit restore evaluation mode and all values, and remove gradients."""
    # a whole step is taken back: weights as well as running statistics; by tensor, because a call may replace buffers
    weights = list(module.parameters())
    copies = {id(weight): weight.detach().clone() for weight in weights if id(weight) not in _CONVERTED}
    with restoring_attributes(module), restoring_buffers(module):
        module.train()
        try:
            yield
        finally:
            with torch.no_grad():
                for weight in weights:
                    # a weight that is converted has its own values beside it: a third copy of all would be too much
                    value = copies.get(id(weight))
                    _restore(weight, _CONVERTED[id(weight)].to(weight.dtype) if value is None else value)
            module.eval()
            module.zero_grad(set_to_none=True)


NOISE = 0.1
"""The size of the noise that is added to zeros, and relative to other constants."""

MAX_NAMES = 3
"""The number of perturbed parameters that are named."""

SMALL = 1e-3
"""Parameters below this size let nothing flow that a comparison could see."""


def constant_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Trainable parameters of zeros or of another constant, or so small that nothing flows through them.

    Output projections of zeros, closed gates and unit gains hide what is behind them.
    """
    found = {}
    trains = any(weight.requires_grad for weight in module.parameters())
    for name, weight in module.named_parameters():
        # a frozen one beside trainable ones is a constant of the model's definition, such as a mask
        if not weight.is_floating_point() or not weight.numel() or (trains and not weight.requires_grad):
            continue
        least, largest = (float(bound) for bound in weight.detach().aminmax())
        # a single number, such as a temperature, says nothing unless it is zero
        constant = least == largest and weight.numel() > 1
        if math.isfinite(least) and math.isfinite(largest) and (constant or max(-least, largest) < SMALL):
            found[name] = weight
    return found


def name_constants(names: Sequence[str]) -> str:
    """The sentence that says which parameters are perturbed."""
    omitted = len(names) - MAX_NAMES
    more = f" and {omitted} more" if omitted > 0 else ""
    return f"parameters of zeros or one constant are perturbed for the check: {', '.join(names[:MAX_NAMES])}{more}"


OwnValues = Sequence[tuple[nn.Parameter, Tensor]]


@contextmanager
def own_values(changed: OwnValues) -> Iterator[None]:
    """Give perturbed parameters their own values; on exit perturb them again."""
    perturbed = [weight.detach().clone() for weight, _ in changed]
    try:
        with torch.no_grad():
            for weight, value in changed:
                weight.copy_(value)
        yield
    finally:
        with torch.no_grad():
            for (weight, _), value in zip(changed, perturbed):
                weight.copy_(value)


@contextmanager
def perturbing_constants(module: nn.Module) -> Iterator[OwnValues]:
    """Add noise to `constant_parameters`, the same in each call, and give their values; on exit restore them."""
    weights = constant_parameters(module)
    values = [weight.detach().clone() for weight in weights.values()]
    generator = torch.Generator().manual_seed(0)
    try:
        with torch.no_grad():
            for weight in weights.values():
                noise = torch.randn(weight.shape, generator=generator).to(weight)
                if weight.abs().max() >= SMALL:
                    # relative, so that rates and gains keep their sign
                    weight.mul_(1 + NOISE * noise)
                else:
                    fan = weight.shape[-1] if weight.ndim > 1 else 1
                    weight.add_(noise, alpha=max(fan**-0.5, 0.02) if fan > 1 else NOISE)
        yield list(zip(weights.values(), values))
    finally:
        with torch.no_grad():
            for weight, value in zip(weights.values(), values):
                weight.copy_(value)


_CONVERTED: dict[int, Tensor] = {}
"""The data of the tensors that `in_dtype` has converted and not yet restored, by the identity of the tensor."""


@contextmanager
def in_dtype(module: nn.Module | None, dtype: torch.dtype | None) -> Iterator[None]:
    """Convert all floating parameters and buffers to `dtype` in place, so that closures over the module use it too."""
    original: list[tuple[Tensor, Tensor]] = []
    if module is not None and dtype is not None:
        # by identity: tied weights are one tensor, which is to be converted and restored once
        tensors = {id(t): t for t in [*module.parameters(), *module.buffers()] if t.is_floating_point()}
        original = [(tensor, tensor.data) for tensor in tensors.values() if tensor.dtype != dtype]
    try:
        for tensor, data in original:
            # in place of the tensor's data, because closures of an adapter hold the same tensor objects
            tensor.data = data.to(dtype)
            _CONVERTED[id(tensor)] = data
        yield
    finally:
        for tensor, data in original:
            _CONVERTED.pop(id(tensor), None)
            # a gradient in the other dtype cannot stay beside restored weights
            tensor.grad = None
            tensor.data = data


def working_dtype(module: nn.Module | None, *, exact: bool) -> torch.dtype | None:
    """The dtype to check in: float64 if `exact`, float32 for weights in half precision, else None (unchanged)."""
    if exact:
        return torch.float64
    if module is not None and any(t.is_floating_point() and t.element_size() < 4 for t in module.parameters()):
        return torch.float32
    return None


def has_float64(device: torch.device) -> bool:
    """Whether the device computes in float64; the GPUs of some makers do not."""
    try:
        torch.zeros(1, dtype=torch.float64, device=device)
    except (TypeError, RuntimeError):
        return False
    return True
