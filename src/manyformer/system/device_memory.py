"""What fits in the memory of a device: models that cannot fit are refused, and failed allocations become sentences."""

import math
import os
import re
import resource
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from manyformer.errors import UserError
from manyformer.system.devices import device_kind

SMALLER_MODEL = "make dim, ff_dim, depth, vocab or max_length smaller, or what else decides the number of weights"
SMALLER_WORK = "make the batch, the length of the rows or the model (dim, depth, vocab) smaller"
"""What reduces the memory of any other work."""
MAX_MODULES = 50_000
"""The most modules that a model may have: creating more takes minutes, whatever their size."""
_SMALL_PRODUCT = 1 << 22
_SMALL_VALUE = 1 << 12
_CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
# what torch, its CPU and CUDA allocators, C++, NumPy and FAISS say if memory cannot be allocated
_FAILED_ALLOCATION = re.compile(
    r"can't allocate memory|out of memory|bad_alloc|bad_array_new|unable to allocate|failed to allocate|"
    r"cannot allocate memory|storage size calculation overflowed|multiplication overflow|ALLOC_FAILED",
    re.IGNORECASE,
)
_REQUESTED = re.compile(r"allocate (\d+) bytes|allocate ([\d.]+ ?[KMGTPE]?i?B)", re.IGNORECASE)


class OutOfMemory(UserError):
    """Memory for some work could not be allocated, or cannot suffice; the sentence says what makes the work smaller."""


def device_memory(device: torch.device) -> int:
    """The bytes of memory that this process can use at most on a device."""
    of_device = device_kind(device).memory(device)
    if of_device is not None:
        return of_device
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    limits += [limit for limit in resource.getrlimit(resource.RLIMIT_AS) if limit != resource.RLIM_INFINITY]
    for file in _CGROUP_LIMITS:
        if file.is_file() and (text := file.read_text().strip()).isdecimal():
            limits.append(int(text))
    return min(limits)


def check_model_fits(
    build: Callable[[], object], name: str, keywords: Mapping[str, Any], *, copies: int, device: torch.device
) -> None:
    """Raise OutOfMemory if `copies` of the parameters of the model that `build` creates do not fit on the device.

    The model is built without storage, and only if the keywords are large; `build` must not be called in vain.
    """
    numbers = sorted((value for value in keywords.values() if type(value) is int), reverse=True)[:3]
    is_small = math.prod(numbers) < _SMALL_PRODUCT and max(numbers, default=0) < _SMALL_VALUE
    if is_small or torch.get_default_device().type == "meta":
        return
    with torch.random.fork_rng(devices=[]), bounded_model(name, copies, device), torch.device("meta"):
        build()


@contextmanager
def bounded_model(name: str, copies: int = 1, device: torch.device | None = None) -> Iterator[None]:
    """Raise OutOfMemory as soon as the modules created in the block are too many, or do not fit on a device."""
    if device is None:
        memory = math.inf
    else:
        memory = device_memory(device)
    sizes: dict[int, tuple[Tensor, int]] = {}
    total = modules = 0

    def add_tensor(module: nn.Module, key: str, tensor: Tensor | None) -> None:
        nonlocal total
        if tensor is None or id(tensor) in sizes:
            return
        sizes[id(tensor)] = tensor, math.prod(tensor.shape) * tensor.element_size() * copies
        total += sizes[id(tensor)][1]
        if device is not None and total > memory:
            purpose = " for its weights"
            if copies > 1:
                purpose = f" to train it, {copies} numbers for each weight"
            raise OutOfMemory(
                f"{name} does not fit into the memory of this {device.type.upper()}, {format_memory(memory)}: "
                f"{format_memory(total)} or more are needed{purpose}; {SMALLER_MODEL}"
            )

    def add_module(module: nn.Module, key: str, child: nn.Module | None) -> None:
        nonlocal modules
        modules += 1
        if modules > MAX_MODULES:
            raise OutOfMemory(
                f"{name} has more than {MAX_MODULES:,} modules, the most that are built; make depth smaller"
            )

    hooks = (
        register_module_parameter_registration_hook(add_tensor),
        register_module_buffer_registration_hook(add_tensor),
        register_module_module_registration_hook(add_module),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def format_memory(size: float) -> str:
    """A number of bytes with three digits and a unit."""
    power = min(5, max(0, int(math.log(max(1, size), 1024))))
    unit = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")[power]
    return f"{size / 1024**power:,.4g} {unit}"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception of any library means that memory could not be allocated."""
    is_kind = isinstance(error, MemoryError | torch.OutOfMemoryError)
    return is_kind or (isinstance(error, RuntimeError | ValueError) and bool(_FAILED_ALLOCATION.search(str(error))))


def describe_request(error: BaseException) -> str:
    """`(16.4 GiB at once)`: the size of a failed allocation with a space before it, empty if the message has none."""
    match = _REQUESTED.search(str(error))
    if match is None:
        return ""
    return f" ({format_memory(int(match[1])) if match[1] else match[2]} at once)"


@contextmanager
def report_out_of_memory(work: str | Callable[[], str], remedy: str) -> Iterator[None]:
    """Convert failed allocations in the block into OutOfMemory: which `work` asked for memory, and the `remedy`.

    A function is asked for the work where it changes within the block."""
    try:
        yield
    except OutOfMemory:
        raise
    except (MemoryError, RuntimeError, ValueError) as error:
        if not is_out_of_memory(error):
            raise
        current_work = work if isinstance(work, str) else work()
        raise OutOfMemory(f"out of memory {current_work}{describe_request(error)}; {remedy}") from error
