"""One training step as a job: what is timed, counted and compared is the step that trains."""

from collections.abc import Sequence
from pathlib import Path
from typing import final

import torch

from manyformer.config import AdamWConfig, RunConfig
from manyformer.models import Model
from manyformer.models.model_files import read_weights
from manyformer.nn.batches import Batch
from manyformer.training.build_model import adapt_model, build_model, choose_device, make_engine, open_run_data
from manyformer.training.engine import TrainingEngine
from manyformer.training.process_group import SINGLE_PROCESS_GROUP, DDPStrategy


@final
class StepJob:
    """A step of an engine on the same batches, each time it is called.

    At learning rate 0 the optimizer does all of its work and the weights stay, on which computation may depend."""

    def __init__(self, engine: TrainingEngine, batches: Sequence[Batch], *, learning_rate: float = 0.0) -> None:
        self.engine = engine
        self._learning_rate = learning_rate
        # counted beforehand, as the thread that reads ahead does where a count would wait for a device
        self._batches = [engine.prepare(batch) for batch in batches]

    def __call__(self) -> None:
        self.engine.step(self._batches, self._learning_rate)


def own_engine(model: Model, *, autocast: torch.dtype | None) -> TrainingEngine:
    """The engine of a model that no run describes: with the optimizer that runs have by default, in one process."""
    # the defaults of a run, so that costs of models are compared under them
    return TrainingEngine(model, AdamWConfig(), DDPStrategy(), autocast=autocast)


def step_of_run(run: RunConfig, folder: Path) -> StepJob:
    """A step of a run on the first batches of its data, with the weights that were trained in its folder."""
    data = open_run_data(run, folder, lambda text: None)
    torch.manual_seed(run.seed)
    device = choose_device(run.device, SINGLE_PROCESS_GROUP)
    model = build_model(run, data, device)
    # a training that diverged has saved no model
    if (folder / "model").is_dir():
        read_weights(model, folder / "model")
    adapt_model(model, run)
    engine = make_engine(run, model, data.train, device, DDPStrategy())
    # as many batches as one step of the run accumulates
    return StepJob(engine, [next(data.train) for _ in range(run.batch.accumulate)])
