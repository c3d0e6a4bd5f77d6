"""Training: `manyformer.train(run)` takes a run from its configuration to its final model and resumes it exactly.

`TrainingSession` opens data, model and checkpoints, `TrainingLoop` makes steps, metrics, evaluations and checkpoints,
`TrainingEngine` holds model and optimizer. Progress is reported as `events` to a listener."""

from manyformer.base.errors import TrainingInterrupted
from manyformer.base.files.atomic_files import DiskFull
from manyformer.training.events import (
    TrainingEvent,
    TrainingFinished,
    TrainingProgress,
    TrainingStarted,
    TrainResult,
    silent,
)
from manyformer.training.session import train
from manyformer.training.training_loop import TrainingDiverged

__all__ = [
    "DiskFull",
    "TrainResult",
    "TrainingDiverged",
    "TrainingEvent",
    "TrainingFinished",
    "TrainingInterrupted",
    "TrainingProgress",
    "TrainingStarted",
    "silent",
    "train",
]
