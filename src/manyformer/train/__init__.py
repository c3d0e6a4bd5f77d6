"""Training: `manyformer.train(run)` takes a run from its configuration to its final model and resumes it exactly.

`TrainingSession` opens data, model and checkpoints, `TrainingLoop` makes steps, metrics, evaluations and checkpoints,
`TrainingEngine` holds model and optimizer. Progress is reported as `events` to a listener."""

from manyformer.errors import TrainingInterrupted
from manyformer.files.atomic_files import DiskFull
from manyformer.train.events import (
    TrainingEvent,
    TrainingFinished,
    TrainingProgress,
    TrainingStarted,
    TrainResult,
    silent,
)
from manyformer.train.session import train
from manyformer.train.training_loop import TrainingDiverged

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
