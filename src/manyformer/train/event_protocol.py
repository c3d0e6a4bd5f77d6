"""Events and errors as lines of JSON, sent from the worker processes of a run to the process that launched them."""

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
_ERRORS = {kind.__name__: kind for kind in (DiskFull, TrainingDiverged, TrainingInterrupted, UserError)}


def encode(event: TrainingEvent | UserError) -> str:
    """Encode an event or error as one line of JSON."""
    if isinstance(event, UserError):
        kind = type(event).__name__
        return json.dumps({"kind": kind if kind in _ERRORS else "UserError", "text": str(event)})
    return json.dumps({"kind": type(event).__name__, **event._asdict()}, default=str)


def decode(line: str) -> TrainingEvent | UserError:
    """Decode a line that `encode` returned."""
    fields = json.loads(line)
    kind = fields.pop("kind")
    if kind in _ERRORS:
        return _ERRORS[kind](fields["text"])
    for name in ("out", "folder"):
        if name in fields:
            fields[name] = Path(fields[name])
    if kind == TrainingStarted.__name__:
        fields["summary_lines"] = tuple((subject, text) for subject, text in fields["summary_lines"])
    if kind == TrainingFinished.__name__:
        fields["next_commands"] = tuple(fields["next_commands"])
    event: TrainingEvent = _EVENTS[kind](**fields)
    return event
