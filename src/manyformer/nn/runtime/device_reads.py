"""What the host may learn from tensors: on a CPU all of it, on a GPU nothing without waiting.

A GPU works through a queue. Where Python reads a number of a tensor, it has to wait until the queue is empty, and the
GPU then waits for Python. Code that chooses by values therefore has a second form that computes the choice as tensors.

A tensor made of a list is copied from the host at each call, for which a GPU waits as well: a `ConstantTensor` is
copied to each device once. What is kept are attributes of one object, which a graph that is being compiled reads like
the weights of a model: a compiler cannot follow how they are made, so it calls `_keep` while it traces.

On a CPU, whose operations cost their memory, they take blocks that stay in its caches (`block_elements`), and reuse
buffers (`ScratchBuffer`).
"""

import itertools
from typing import Any, final

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from manyformer.nn.runtime.torch_internals import constant_for_compiler, is_traced

BLOCK_ELEMENTS = 96 << 10
"""Elements of a tensor, for each thread of a CPU, that several operations read in turn before the next ones."""

_NAMES: dict[tuple[Any, torch.dtype], str] = {}
_VALUES: dict[str, tuple[Any, torch.dtype]] = {}
_numbers = itertools.count()


def reads_are_free(x: Tensor) -> bool:
    """Whether Python may branch on values of `x` without waiting: on a CPU, and where shapes alone are computed.

    Not where numbers are hidden by a transformation; a graph that is being compiled ends at such a branch."""
    return x.device.type in ("cpu", "meta") and (torch.compiler.is_dynamo_compiling() or not is_traced())


def is_readable(x: Tensor) -> bool:
    """Whether reading numbers of `x` is possible and free: on a CPU, outside of graphs and of `torch.func`."""
    return x.device.type == "cpu" and not is_traced()


def places_of(mask: Bool[Tensor, " n"], count: int | None) -> Int[Tensor, " m"]:
    """Where the mask is set, in order. Without the `count` of these places a device would have to be waited for."""
    if count is None or reads_are_free(mask):
        return mask.nonzero()[:, 0]
    # a stable sort keeps the order of the places, and those that are set come first
    return (~mask).to(torch.uint8).argsort(stable=True)[:count]


def count_values(values: Int[Tensor, "*n"], size: int) -> Int[Tensor, " size"]:
    """How often each of the numbers below `size` occurs: `torch.bincount`, which on a GPU reads the largest value."""
    flat = values.flatten()
    # adding ones at the values needs no size from the device
    return torch.zeros(size, dtype=torch.long, device=flat.device).scatter_add(0, flat, torch.ones_like(flat))


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
        # by a counter, not by their number: two threads that build models must not give two constants one name
        self.name = _NAMES.setdefault((values, dtype), f"values_{next(_numbers)}")
        _VALUES[self.name] = values, dtype

    def __reduce__(self) -> tuple[type["ConstantTensor"], tuple[Any, ...]]:
        # another process has other names
        return ConstantTensor, (self.values, self.dtype)

    def on(self, device: torch.device) -> Tensor:
        """The tensor on `device`."""
        # a graph that is recorded, or tensors without numbers, have constants of their own
        if is_traced() and not torch.compiler.is_dynamo_compiling():
            return torch.tensor(self.values, dtype=self.dtype, device=device)
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


class ScratchBuffer:
    """Named buffers that are reused between calls, because allocating memory costs most."""

    def __init__(self, like: Tensor) -> None:
        self._like = like.new_empty(0)
        self._buffers: dict[str, Tensor] = {}

    def __call__(self, name: str, *shape: int) -> Tensor:
        """An uninitialized view of the buffer `name` with this shape; valid until `name` is requested again."""
        count = torch.Size(shape).numel()
        if name not in self._buffers or len(self._buffers[name]) < count:
            self._buffers[name] = self._like.new_empty(count)
        return self._buffers[name][:count].view(shape)

    def clear(self) -> None:
        """Free all buffers, so that none occupies memory between a forward and a backward pass."""
        self._buffers.clear()


def block_elements(x: Tensor) -> int:
    """The elements of a block of x: all of it where launching an operation costs more than reading x again."""
    if is_readable(x):
        return BLOCK_ELEMENTS * torch.get_num_threads()
    return max(1, x.numel())
