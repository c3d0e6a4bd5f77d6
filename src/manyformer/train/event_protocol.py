"""Events and errors as lines of JSON, sent from the worker processes of a run to the process that launched them."""

import json
from typing import get_args

from pydantic import TypeAdapter

from manyformer.errors import UserError
from manyformer.train.durable_files import DiskFull
from manyformer.train.events import TrainingEvent
from manyformer.train.signals import TrainingInterrupted
from manyformer.train.training_loop import TrainingDiverged

_EVENTS: dict[str, TypeAdapter[TrainingEvent]] = {kind.__name__: TypeAdapter(kind) for kind in get_args(TrainingEvent)}
_ERRORS = {kind.__name__: kind for kind in (DiskFull, TrainingDiverged, TrainingInterrupted, UserError)}


def encode(event: TrainingEvent | UserError) -> str:
    """Encode an event or error as one line of JSON."""
    kind = type(event).__name__
    if isinstance(event, UserError):
        return json.dumps([kind if kind in _ERRORS else "UserError", str(event)])
    return json.dumps([kind, _EVENTS[kind].dump_python(event, mode="json")])


def decode(line: str) -> TrainingEvent | UserError:
    """Decode a line that `encode` returned."""
    kind, content = json.loads(line)
    return _ERRORS[kind](content) if kind in _ERRORS else _EVENTS[kind].validate_python(content)
