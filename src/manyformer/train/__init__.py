"""ExitTraining: `manyformer.train(run)` from its record to its final model, interrupted and continued exactly.

A run is `TrainingSession` (opens what is needed) around `TrainingLoop` (steps, metrics, evaluations, checkpoints)
around `TrainingEngine` (model and optimiser). Whoever wants to see something listens to `events`."""

from manyformer.train.durable_files import DiskFull
from manyformer.train.events import (
    CheckpointSaved,
    EventListener,
    TrainingEvent,
    TrainingFinished,
    TrainingNote,
    TrainingProgress,
    TrainingStarted,
    TrainingValidated,
    silent,
)
from manyformer.train.run_training import train
from manyformer.train.session import TrainResult
from manyformer.train.signals import TrainingInterrupted
from manyformer.train.training_loop import TrainingDiverged

__all__ = [
    "CheckpointSaved",
    "DiskFull",
    "EventListener",
    "TrainResult",
    "TrainingDiverged",
    "TrainingEvent",
    "TrainingFinished",
    "TrainingInterrupted",
    "TrainingNote",
    "TrainingProgress",
    "TrainingStarted",
    "TrainingValidated",
    "silent",
    "train",
]
