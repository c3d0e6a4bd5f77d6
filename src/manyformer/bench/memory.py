"""Measure the memory that a job needs beyond what was in use before, and the largest tensor that it allocates."""

import ctypes
import gc
from contextlib import suppress
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from manyformer.bench.clock import TimedJob
from manyformer.system.devices import device_kind
from manyformer.torch_internals import TorchDispatchMode, tree_leaves

PROCESS = Path("/proc/self")


def extra_memory(job: TimedJob, device: torch.device) -> int | None:
    """The peak of memory during one run of `job` minus what was in use before, in bytes; None if unknown.

    On a GPU it is what torch allocated, where torch records the peak; on a CPU the resident memory of the process, as
    Linux reports it. Run the job once before: the first run also allocates what persists.
    """
    gc.collect()
    kind = device_kind(device)
    if kind.measures_memory:
        kind.synchronize(device)
        kind.module.reset_peak_memory_stats(device)
        allocated_bytes: int = kind.module.memory_allocated(device)
        job()
        kind.synchronize(device)
        peak_bytes: int = kind.module.max_memory_allocated(device)
        return peak_bytes - allocated_bytes
    if not kind.is_host or not _reset_peak():
        return None
    initial_bytes = _status_bytes("VmRSS")
    job()
    return max(0, _status_bytes("VmHWM") - initial_bytes)


def _reset_peak() -> bool:
    """Return unused memory to the system and reset the peak; False if the system does not support it."""
    # memory cached by the allocator would be reused and not counted
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    try:
        (PROCESS / "clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _status_bytes(field: str) -> int:
    """A size from the process's status, in bytes."""
    for line in (PROCESS / "status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{PROCESS}/status has no {field}")


@final
class LargestTensorMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode whose `elements` is the number of elements of the largest tensor that any operator returned.

    The size of a tensor's storage counts, not that of the view.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.elements = max(self.elements, leaf.untyped_storage().nbytes() // leaf.element_size())
        return result
