"""Events, results and mistakes as lines of JSON, from the processes of a run to the one that was called."""

import json
from pathlib import Path
from typing import Any

from manyformer.errors import UserError
from manyformer.train.disk import DiskFull
from manyformer.train.events import Event, Finished, Note, Progress, Saved, Started, Validated
from manyformer.train.loop import Diverged
from manyformer.train.signals import Interrupted

_EVENTS: dict[str, Any] = {kind.__name__: kind for kind in (Started, Progress, Validated, Saved, Note, Finished)}
_MISTAKES = {kind.__name__: kind for kind in (DiskFull, Diverged, Interrupted, UserError)}


def encode(said: Event | UserError) -> str:
    """One line."""
    if isinstance(said, UserError):
        kind = type(said).__name__
        return json.dumps({"kind": kind if kind in _MISTAKES else "UserError", "text": str(said)})
    return json.dumps({"kind": type(said).__name__, **said._asdict()}, default=str)


def decode(line: str) -> Event | UserError:
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
    event: Event = _EVENTS[kind](**given)
    return event
