"""Training: `manyformer.train(run)` takes a run from its configuration to its final model and resumes it exactly.

`TrainingSession` opens data, model and checkpoints, `TrainingLoop` makes steps, metrics, evaluations and checkpoints,
`TrainingEngine` holds model and optimizer. Progress is reported as `events` to a listener."""

from typing import TYPE_CHECKING

from manyformer.base.lazy_names import offer_names as _offer_names

if TYPE_CHECKING:
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

_MODULES = {
    "DiskFull": "manyformer.base.files.atomic_files",
    "TrainResult": "manyformer.training.events",
    "TrainingDiverged": "manyformer.training.training_loop",
    "TrainingEvent": "manyformer.training.events",
    "TrainingFinished": "manyformer.training.events",
    "TrainingInterrupted": "manyformer.base.errors",
    "TrainingProgress": "manyformer.training.events",
    "TrainingStarted": "manyformer.training.events",
    "silent": "manyformer.training.events",
    "train": "manyformer.training.session",
}

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


_offer_names(__name__, _MODULES)
