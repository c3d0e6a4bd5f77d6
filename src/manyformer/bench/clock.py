"""Timing on a machine that may be busy: jobs are interleaved, and ratios are taken within one round."""

import gc
import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from manyformer.system.devices import device_kind

TimedJob = Callable[[], object]

MIN_SECONDS = 0.02
"""A job that takes less than this many seconds is repeated and its mean time taken."""

BUSY_LOAD = 0.5
"""Load average above which a warning is given: a two-core machine then has less than 1.5 cores free."""

NOISY_SPREAD = 0.25
"""Times are noisy where their interquartile range exceeds this share of their median."""


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
    repeats = {name: max(1, math.ceil(MIN_SECONDS / max(expected_seconds[name], 1e-6))) for name in names}
    for number in range(rounds):
        gc.collect()
        start = number % max(1, len(names))
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
        return MedianWithQuartiles(*values * 3)
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
