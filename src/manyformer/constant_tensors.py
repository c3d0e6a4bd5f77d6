"""Numbers that never change, as tensors that are copied to each device once.

A tensor made of a list is copied from the host at each call, and a GPU waits for that. Those that are kept here are
attributes of one object, which a graph that is being compiled reads like the weights of a model: a compiler cannot
follow how they are made, so it calls `_keep` while it traces.
"""

from typing import Any, final

import torch
from torch import Tensor

from manyformer.torch_internals import constant_for_compiler

_NAMES: dict[tuple[Any, torch.dtype], str] = {}
_VALUES: dict[str, tuple[Any, torch.dtype]] = {}


class _KeptTensors:
    """An attribute for each constant on each device."""

    placeholder = torch.zeros((), device="cpu")


_KEPT = _KeptTensors()


@final
class ConstantTensor:
    """`values`, numbers or tuples of them, as a tensor on each device; nobody may write into it."""

    def __init__(self, values: tuple[Any, ...], dtype: torch.dtype) -> None:
        self.values = values
        self.dtype = dtype
        self.name = _NAMES.setdefault((values, dtype), f"values_{len(_NAMES)}")
        _VALUES[self.name] = values, dtype

    def __reduce__(self) -> tuple[type["ConstantTensor"], tuple[Any, ...]]:
        # another process has other names
        return ConstantTensor, (self.values, self.dtype)

    def on(self, device: torch.device) -> Tensor:
        """The tensor on `device`."""
        _keep(self.name, device)
        return kept_tensor(self.name, device)


def kept_tensor(name: str, device: torch.device) -> Tensor:
    """The tensor of this name that `keep_values` has been called for."""
    constant: Tensor = getattr(_KEPT, f"{name}_{device.type}_{device.index}")
    return constant


def keep_values(name: str, values: tuple[Any, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Keep values under a name, an identifier. Returns a tensor that means nothing, as compilers need."""
    attribute = f"{name}_{device.type}_{device.index}"
    if not hasattr(_KEPT, attribute):
        # outside inference mode, whose tensors could not be used in training later
        with torch.inference_mode(mode=False):
            setattr(_KEPT, attribute, torch.tensor(values, dtype=dtype, device=device))
    return _KeptTensors.placeholder


@constant_for_compiler
def _keep(name: str, device: torch.device) -> Tensor:
    return keep_values(name, *_VALUES[name], device)
