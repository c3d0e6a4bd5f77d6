"""The cost of a training step of each case: memory, and time measured in alternation so that load affects all cases."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from manyformer.bench.clock import median_with_quartiles, take_turns
from manyformer.bench.memory import extra_memory
from manyformer.config import RunConfig
from manyformer.train.step_job import step_of_run

ROUNDS = 7
"""How many times each case's step is timed."""


class StepCost(NamedTuple):
    """The cost of a training step: the median time in seconds, and the peak extra memory in bytes if measurable."""

    seconds: float
    memory: int | None


def measure_steps(runs: Mapping[str, tuple[RunConfig, Path]], rounds: int = ROUNDS) -> dict[str, StepCost]:
    """Measure a training step of each run on a batch of its data; the path is the run's folder."""
    jobs = {name: step_of_run(run, folder) for name, (run, folder) in runs.items()}
    device = next(iter(jobs.values())).engine.device
    for job in jobs.values():
        job()
    memories = {name: extra_memory(job, device) for name, job in jobs.items()}
    times = take_turns(jobs, rounds, device)
    return {name: StepCost(median_with_quartiles(times[name]).median, memories[name]) for name in jobs}
