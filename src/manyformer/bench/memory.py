"""Measure the memory that a job needs beyond what was in use before."""

import ctypes
import gc
from contextlib import suppress
from pathlib import Path

import torch

from manyformer.bench.clock import TimedJob

PROCESS = Path("/proc/self")


def extra_memory(job: TimedJob, device: torch.device) -> int | None:
    """The peak of memory during one run of `job` minus what was in use before, in bytes; None if unknown.

    On CUDA it is what torch allocated; on a CPU the resident memory of the process, as Linux reports it. Run the job
    once before: the first run also allocates what persists.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        initial_bytes = torch.cuda.memory_allocated(device)
        job()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - initial_bytes
    if device.type != "cpu" or not _reset_peak():
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
