"""Events, results and mistakes as lines of JSON, from the processes of a run to the one that was called."""

import json
from pathlib import Path
from typing import Any

from manyformer.errors import UserError
from manyformer.train.durable_files import DiskFull
from manyformer.train.events import (
    CheckpointSaved,
    TrainingEvent,
    TrainingFinished,
    TrainingNote,
    TrainingProgress,
    TrainingStarted,
    TrainingValidated,
)
from manyformer.train.signals import TrainingInterrupted
from manyformer.train.training_loop import TrainingDiverged

_EVENTS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (TrainingStarted, TrainingProgress, TrainingValidated, CheckpointSaved, TrainingNote, TrainingFinished)
}
_MISTAKES = {kind.__name__: kind for kind in (DiskFull, TrainingDiverged, TrainingInterrupted, UserError)}


def encode(said: TrainingEvent | UserError) -> str:
    """One line."""
    if isinstance(said, UserError):
        kind = type(said).__name__
        return json.dumps({"kind": kind if kind in _MISTAKES else "UserError", "text": str(said)})
    return json.dumps({"kind": type(said).__name__, **said._asdict()}, default=str)


def decode(line: str) -> TrainingEvent | UserError:
    """What `encode` was given."""
    given = json.loads(line)
    kind = given.pop("kind")
    if kind in _MISTAKES:
        return _MISTAKES[kind](given["text"])
    for name in ("out", "folder"):
        if name in given:
            given[name] = Path(given[name])
    if kind == "Started":
        given["lines"] = tuple((subject, text) for subject, text in given["lines"])
    if kind == "Finished":
        given["next"] = tuple(given["next"])
    event: TrainingEvent = _EVENTS[kind](**given)
    return event
