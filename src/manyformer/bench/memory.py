"""How much memory a job needs beyond what is there before it."""

import ctypes
import gc
from contextlib import suppress
from pathlib import Path

import torch

from manyformer.bench.clock import TimedJob

PROCESS = Path("/proc/self")


def extra_memory(job: TimedJob, device: torch.device) -> int | None:
    """The peak of memory during one run of `job` minus what was in use before, in bytes; None where nobody can tell.

    On an accelerator it is what torch allocated; on a CPU the resident memory of the process, as Linux keeps it. Run
    the job once before: the first run also sets up what stays.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        job()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    if device.type != "cpu" or not _forget_peak():
        return None
    before = _resident("VmRSS")
    job()
    return max(0, _resident("VmHWM") - before)


def _forget_peak() -> bool:
    """Give unused memory back and let the peak begin at what is left; False where the system has no such thing."""
    # what the allocator keeps for later would be used again and not be seen
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    try:
        (PROCESS / "clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _resident(field: str) -> int:
    """A size from the process's status, in bytes."""
    for line in (PROCESS / "status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{PROCESS}/status has no {field}")
