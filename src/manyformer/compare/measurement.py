"""Measurements of trainings: scores, in a run's file and in an archive for other machines, and the cost of a step."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ConfigDict

from manyformer.bench.clock import median_with_quartiles, take_turns
from manyformer.bench.memory import extra_memory
from manyformer.config import RunConfig
from manyformer.files.json_records import FileRecord, JsonLines
from manyformer.train.step_job import step_of_run

ROUNDS = 7
"""How many times each case's step is timed."""


@dataclass(frozen=True)
class CaseMeasurement:
    """The measurement of a case with one seed: scores for each value of the sweep, or the reason why one is missing.

    `trial` names the trial of the case that was trained, and `selection` is its first score on the validation data, by
    which the best trial is chosen; they are empty and None for a case without trials."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    case: str
    seed: int
    scores: tuple[dict[str, float | None], ...]
    reasons: tuple[str | None, ...]
    minutes: float | None
    steps: int
    tokens: int
    parameters: int | None
    trial: str = ""
    selection: float | None = None


class MeasurementRecord(FileRecord):
    """The measurement of a case with one seed, and a hash of all that it depends on."""

    title = "the measurement of a comparison"
    key: str
    measurement: CaseMeasurement


@dataclass(frozen=True)
class ArchivedMeasurement:
    """A measurement with the hash of all that it depends on, and where and when it was made.

    `settings` are those of the run that differ from the defaults, for people: the hash alone decides."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    key: str
    comparison: str
    settings: dict[str, Any]
    measurement: CaseMeasurement
    machine: str
    version: str
    date: str


MeasurementArchive = JsonLines[ArchivedMeasurement]
"""A file of measurements that any checkout and machine can read and continue."""


def open_archive(path: Path) -> MeasurementArchive:
    """The archive in a file, empty where there is none. Raises DamagedFile."""
    return JsonLines(path, ArchivedMeasurement, "a line of an archive of measurements")


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
