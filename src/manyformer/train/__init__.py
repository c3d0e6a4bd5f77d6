"""Training: `manyformer.train(run)` from its record to its final model, interrupted and continued exactly.

A run is `Session` (opens what is needed) around `Loop` (steps, metrics, evaluations, checkpoints) around `Engine`
(model and optimiser). Whoever wants to see something listens to `events`.
"""

from manyformer.train.disk import DiskFull
from manyformer.train.events import Event, Finished, Listener, Note, Progress, Saved, Started, Validated, silent
from manyformer.train.loop import Diverged
from manyformer.train.session import TrainResult
from manyformer.train.signals import Interrupted
from manyformer.train.verb import train

__all__ = [
    "DiskFull",
    "Diverged",
    "Event",
    "Finished",
    "Interrupted",
    "Listener",
    "Note",
    "Progress",
    "Saved",
    "Started",
    "TrainResult",
    "Validated",
    "silent",
    "train",
]
