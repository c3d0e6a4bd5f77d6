"""What a training step of each case costs: time in turns, so that a busy machine disturbs all alike, and memory."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from manyformer.bench.clock import middle, take_turns
from manyformer.bench.memory import extra_memory
from manyformer.config import RunConfig
from manyformer.models.model_files import read_weights
from manyformer.train.build_model import build_model, choose_device, make_objective
from manyformer.train.engine import TrainingEngine
from manyformer.train.parallel_strategy import SingleProcess
from manyformer.train.process_group import ALONE
from manyformer.train.run_training import open_source

ROUNDS = 7


class StepCost(NamedTuple):
    """A training step: the median time in seconds, and the memory it needs for a while in bytes, where known."""

    seconds: float
    memory: int | None


def steps(runs: Mapping[str, tuple[RunConfig, Path]], rounds: int = ROUNDS) -> dict[str, StepCost]:
    """Time a step of each run on a batch of its own data; the path is the run's folder."""
    jobs = {name: _Job(run, folder) for name, (run, folder) in runs.items()}
    device = choose_device(next(iter(runs.values()))[0].device, ALONE)
    for job in jobs.values():
        job()
    memory = {name: extra_memory(job, device) for name, job in jobs.items()}
    times = take_turns(jobs, rounds, device)
    return {name: StepCost(middle(times[name]).median, memory[name]) for name in jobs}


class _Job:
    """One step of the trained model, whose work may depend on what it has learned, at a learning rate of 0."""

    def __init__(self, run: RunConfig, folder: Path) -> None:
        data = open_source(run, folder, lambda text: None)
        torch.manual_seed(run.seed)
        model = build_model(run, data)
        # there is none where training came to nothing
        if (folder / "model").is_dir():
            read_weights(model, folder / "model")
        objective = make_objective(run, model, choose_device(run.device, ALONE))
        self._engine = TrainingEngine(objective, run.optim, SingleProcess(), goes_on=data.train.goes_on)
        self._batches = [next(data.train) for _ in range(run.batch.accumulate)]

    def __call__(self) -> None:
        self._engine.step(self._batches, 0.0)
