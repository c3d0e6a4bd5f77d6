"""The cost of a training step of each case: memory, and time measured in alternation so that load affects all cases."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from manyformer.bench.clock import median_with_quartiles, take_turns
from manyformer.bench.memory import extra_memory
from manyformer.config import RunConfig
from manyformer.models.model_files import read_weights
from manyformer.train.adaptation import adapt_model
from manyformer.train.build_model import build_model, choose_device, make_objective
from manyformer.train.engine import TrainingEngine
from manyformer.train.parallel_strategy import DDPStrategy
from manyformer.train.process_group import SINGLE_PROCESS_GROUP
from manyformer.train.run_training import open_run_data

ROUNDS = 7
"""How many times each case's step is timed."""


class StepCost(NamedTuple):
    """The cost of a training step: the median time in seconds, and the peak extra memory in bytes if measurable."""

    seconds: float
    memory: int | None


def measure_steps(runs: Mapping[str, tuple[RunConfig, Path]], rounds: int = ROUNDS) -> dict[str, StepCost]:
    """Measure a training step of each run on a batch of its data; the path is the run's folder."""
    jobs = {name: StepJob(run, folder) for name, (run, folder) in runs.items()}
    device = choose_device(next(iter(runs.values()))[0].device, SINGLE_PROCESS_GROUP)
    for job in jobs.values():
        job()
    memories = {name: extra_memory(job, device) for name, job in jobs.items()}
    times = take_turns(jobs, rounds, device)
    return {name: StepCost(median_with_quartiles(times[name]).median, memories[name]) for name in jobs}


class StepJob:
    """One training step of the trained model at learning rate 0; its computation may depend on the weights."""

    def __init__(self, run: RunConfig, folder: Path) -> None:
        data = open_run_data(run, folder, lambda text: None)
        torch.manual_seed(run.seed)
        device = choose_device(run.device, SINGLE_PROCESS_GROUP)
        model = build_model(run, data, device)
        # a training that diverged has saved no model
        if (folder / "model").is_dir():
            read_weights(model, folder / "model")
        adapt_model(model, run)
        objective = make_objective(run, model, device)
        data.train.attach(model)
        self.engine = TrainingEngine(objective, run.optim, DDPStrategy(), rows_continue=data.train.rows_continue)
        self._batches = [next(data.train) for _ in range(run.batch.accumulate)]

    def __call__(self) -> None:
        self.engine.step(self._batches, 0.0)
