"""What a run tells while it goes: small records, given one after the other to whoever listens."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple


class TrainingStarted(NamedTuple):
    """What is trained on what: pairs of a subject and a line about it."""

    lines: tuple[tuple[str, str], ...]
    out: Path


class TrainingProgress(NamedTuple):
    """After a step: its loss and learning rate, tokens learned from per second, share of the run done, seconds left.

    `logged` where the step is one of those that go into the metrics; the others come a few times a second at most.
    """

    step: int
    steps: int | None
    loss: float
    learning_rate: float
    tokens_per_second: float
    share: float
    left: float
    logged: bool


class TrainingValidated(NamedTuple):
    """The validation data was scored; `best` where no earlier score was better."""

    step: int
    scores: dict[str, float]
    best: bool
    seconds: float


class CheckpointSaved(NamedTuple):
    """A checkpoint is on the disk, whole."""

    step: int
    folder: Path


class TrainingNote(NamedTuple):
    """A sentence for people: what was found, chosen or repaired."""

    text: str


class TrainingFinished(NamedTuple):
    """The run is over and the final model is saved; `next_commands` are commands that go on from here."""

    step: int
    why: str
    chosen: str
    scores: dict[str, float]
    out: Path
    next_commands: tuple[str, ...]


TrainingEvent = (
    TrainingStarted | TrainingProgress | TrainingValidated | CheckpointSaved | TrainingNote | TrainingFinished
)
EventListener = Callable[[TrainingEvent], None]


def silent(event: TrainingEvent) -> None:
    """The listener that says nothing."""


def broadcast(*listeners: EventListener) -> EventListener:
    """One listener that passes every event on to all of these."""

    def tell(event: TrainingEvent) -> None:
        for listener in listeners:
            listener(event)

    return tell
