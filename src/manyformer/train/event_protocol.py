"""Events and errors as lines of JSON, sent from the worker processes of a run to the process that launched them."""

import json
import time
import traceback
from typing import NamedTuple, get_args

from pydantic import TypeAdapter

from manyformer.errors import TrainingInterrupted, UserError
from manyformer.files.atomic_files import DiskFull, NotWritable
from manyformer.files.json_text import json_text, with_named_numbers
from manyformer.train.events import TrainingEvent
from manyformer.train.training_loop import TrainingDiverged

_EVENTS: dict[str, TypeAdapter[TrainingEvent]] = {kind.__name__: TypeAdapter(kind) for kind in get_args(TrainingEvent)}
_ERRORS = {kind.__name__: kind for kind in (DiskFull, NotWritable, TrainingDiverged, TrainingInterrupted, UserError)}


class WorkerFailure(NamedTuple):
    """The error that ended a worker process, and its time; `traceback` is empty for an error of the user's input."""

    kind: str
    message: str
    traceback: str
    at: float

    @classmethod
    def of(cls, error: Exception) -> "WorkerFailure":
        """The failure that an exception describes."""
        kind = type(error).__name__
        if isinstance(error, UserError):
            return cls(kind if kind in _ERRORS else "UserError", str(error), "", time.monotonic())
        return cls(kind, str(error), traceback.format_exc(), time.monotonic())

    @property
    def is_timeout(self) -> bool:
        """Whether the process has waited in vain for another one."""
        return bool(self.traceback) and "timed out" in self.message.lower()

    def as_error(self, process: str) -> Exception:
        """The error to raise in the process that launched this one; a defect has the traceback as its cause."""
        if self.kind in _ERRORS:
            return _ERRORS[self.kind](self.message)
        error = RuntimeError(f"{process}: {self.kind}: {self.message}")
        error.__cause__ = RuntimeError(f"\n{self.traceback}")
        return error


def encode(event: TrainingEvent | WorkerFailure) -> str:
    """Encode an event or failure as one line of JSON."""
    kind = type(event).__name__
    if isinstance(event, WorkerFailure):
        content = event
    else:
        content = _EVENTS[kind].dump_python(event, mode="json")
    # seconds that are not known yet and a score may be NaN, which the reader restores
    return json_text(with_named_numbers([kind, content]), ensure_ascii=True)


def decode(line: str) -> TrainingEvent | WorkerFailure:
    """Decode a line that `encode` returned."""
    kind, content = json.loads(line)
    if kind == "WorkerFailure":
        return WorkerFailure(*content)
    return _EVENTS[kind].validate_python(content)
