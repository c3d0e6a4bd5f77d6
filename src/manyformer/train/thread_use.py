"""Whether the threads of a training on a CPU compute, or mostly wait beside other work of the machine."""

import os

MEASURED_SECONDS = 10.0
"""How long the first steps are measured."""

LEAST_USE = 0.7
"""Seconds of computation in a second, by all threads, below which a single thread may be faster than several."""


def describe_waiting_threads(seconds: float, cpu_seconds: float, threads: int) -> str | None:
    """A sentence if several threads computed less in this time than one could have, else None.

    Threads wait for each other at the end of each operation, so that a busy processor delays all of them. The number of
    threads is not changed, because it changes the last digits of results: a run that resumes would not repeat those of
    an uninterrupted one. Nothing is said if OMP_NUM_THREADS is set, which is then somebody's choice.
    """
    if threads < 2 or cpu_seconds >= LEAST_USE * seconds or "OMP_NUM_THREADS" in os.environ:
        return None
    problem = f"{threads} threads computed for {cpu_seconds:.1f} of the first {seconds:.1f} s and waited otherwise"
    remedy = "a run with OMP_NUM_THREADS=1 may be faster (its results differ in the last digits)"
    return f"{problem}, so other work seems to occupy the processor; {remedy}"
