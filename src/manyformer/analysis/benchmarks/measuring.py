"""Measuring jobs on a machine that may be busy: their time, and the memory that they need.

Jobs are interleaved, and ratios are taken within one round. Memory is what a job needs beyond what was in use before;
`LargestTensorMode` measures the largest tensor that it allocates."""

import ctypes
import gc
import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from manyformer.nn.runtime.devices import device_kind
from manyformer.nn.runtime.torch_internals import TorchDispatchMode, tree_leaves

TimedJob = Callable[[], object]

MIN_SECONDS = 0.02
"""A job that takes less than this many seconds is repeated and its mean time taken."""

BUSY_LOAD = 0.5
"""Load average above which a warning is given: a two-core machine then has less than 1.5 cores free."""

NOISY_SPREAD = 0.25
"""Times are noisy where their interquartile range exceeds this share of their median."""

PROCESS = Path("/proc/self")


def take_turns(
    jobs: Mapping[str, TimedJob],
    rounds: int,
    device: torch.device,
    *,
    expected_seconds: Mapping[str, float] | None = None,
) -> dict[str, list[float]]:
    """Seconds of each job in each round; a round runs every job, and the first job rotates.

    `expected_seconds` are rough times of the jobs; without it each job is run once to measure them.
    """
    names = list(jobs)
    times: dict[str, list[float]] = {name: [] for name in names}
    if expected_seconds is None:
        expected_seconds = {name: time_job(job, device) for name, job in jobs.items()}
    # the clock and a call of it are no longer seen in the mean of that many runs
    repeats = {name: max(1, math.ceil(MIN_SECONDS / max(expected_seconds[name], 1e-6))) for name in names}
    for number in range(rounds):
        gc.collect()
        start = number % max(1, len(names))
        # who runs first after a collection finds cold caches; no job always does
        for name in names[start:] + names[:start]:
            times[name].append(time_job(jobs[name], device, repeats[name]))
    return times


def time_job(job: TimedJob, device: torch.device, repeats: int = 1) -> float:
    """Mean seconds of `repeats` consecutive runs; accelerators are synchronized."""
    wait = device_kind(device).synchronize
    wait(device)
    started = time.perf_counter()
    for _ in range(repeats):
        job()
    wait(device)
    return (time.perf_counter() - started) / repeats


class MedianWithQuartiles(NamedTuple):
    """The median of some numbers with their lower and upper quartile."""

    median: float
    low: float
    high: float


def median_with_quartiles(numbers: Iterable[float]) -> MedianWithQuartiles:
    """The median and quartiles of `numbers`; of a single number, that number three times."""
    values = list(numbers)
    if len(values) == 1:
        # quantiles need two numbers
        return MedianWithQuartiles(*values * 3)
    # inclusive: the numbers are all there are, not a sample of others
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return MedianWithQuartiles(median, low, high)


def paired_ratio(times: Sequence[float], reference_times: Sequence[float]) -> MedianWithQuartiles:
    """Median and quartiles of the ratio within each round, which cancels what slows a whole round."""
    return median_with_quartiles(a / b for a, b in zip(times, reference_times, strict=True))


def is_noisy(times: Sequence[float]) -> bool:
    """Whether the times of one job vary more than on an idle machine."""
    median, low, high = median_with_quartiles(times)
    return (high - low) / median > NOISY_SPREAD


def load_average() -> float | None:
    """The load average of the last minute; None if it is unknown."""
    try:
        return os.getloadavg()[0]
    except OSError:
        return None


def load_warning() -> str | None:
    """A warning if other processes load the machine; None if it is idle or its load is unknown."""
    load = load_average()
    if load is None or load <= BUSY_LOAD:
        return None
    cores = os.cpu_count() or 1
    return (
        f"the machine was busy before the measurement (load {load:.1f} on {cores} cores): "
        "trust ratios rather than times, or measure again when it is quiet"
    )


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
class LargestTensorMode(TorchDispatchMode):
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
                # of the storage: a view of one element may keep a large tensor alive
                self.elements = max(self.elements, leaf.untyped_storage().nbytes() // leaf.element_size())
        return result
