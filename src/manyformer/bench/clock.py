"""Time on a machine that may be busy: alternatives take turns, and what counts is their ratio within one round."""

import gc
import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

TimedJob = Callable[[], object]

SHORTEST = 0.02
"""A job that takes less than this many seconds is run several times in a row and the time divided."""

CROWD = 0.5
"""A load above this many busy cores leaves less than a whole core of a two-core machine."""

RESTLESS = 0.25
"""Where the middle half of the times spreads by more than this share of their median, somebody disturbed them."""


def take_turns(
    jobs: Mapping[str, TimedJob], rounds: int, device: torch.device, *, about: Mapping[str, float] | None = None
) -> dict[str, list[float]]:
    """Seconds of each job in each round; a round runs every job, and each round begins with another one.

    `about` says how long the jobs take, roughly; without it each is run once to find out.
    """
    names = list(jobs)
    times: dict[str, list[float]] = {name: [] for name in names}
    expected = {name: once(job, device) for name, job in jobs.items()} if about is None else about
    repeats = {name: max(1, math.ceil(SHORTEST / max(expected[name], 1e-6))) for name in names}
    for number in range(rounds):
        gc.collect()
        start = number % max(1, len(names))
        for name in names[start:] + names[:start]:
            times[name].append(once(jobs[name], device, repeats[name]))
    return times


def once(job: TimedJob, device: torch.device, repeats: int = 1) -> float:
    """Seconds of one run, the mean of `repeats` in a row; an accelerator is waited for."""
    _wait(device)
    begun = time.perf_counter()
    for _ in range(repeats):
        job()
    _wait(device)
    return (time.perf_counter() - begun) / repeats


class MedianWithQuartiles(NamedTuple):
    """The median of some numbers, and the quartiles around it."""

    median: float
    low: float
    high: float


def middle(numbers: Iterable[float]) -> MedianWithQuartiles:
    """Of one number, three times that number."""
    known = list(numbers)
    if len(known) == 1:
        return MedianWithQuartiles(*known * 3)
    low, median, high = statistics.quantiles(known, n=4, method="inclusive")
    return MedianWithQuartiles(median, low, high)


def paired(times: Sequence[float], others: Sequence[float]) -> MedianWithQuartiles:
    """The middle over rounds of the ratio within a round: what disturbs a whole round falls out."""
    return middle(a / b for a, b in zip(times, others, strict=True))


def is_noisy(times: Sequence[float]) -> bool:
    """Whether the times of one job differ more than a quiet machine would let them."""
    median, low, high = middle(times)
    return (high - low) / median > RESTLESS


def load_warning() -> str | None:
    """A warning where other processes are at work, None where all is quiet or nobody can tell."""
    try:
        load = os.getloadavg()[0]
    except OSError:
        return None
    if load <= CROWD:
        return None
    cores = os.cpu_count() or 1
    return (
        f"the machine was busy before the measurement (load {load:.1f} on {cores} cores): "
        "trust ratios rather than times, or measure again when it is quiet"
    )


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
