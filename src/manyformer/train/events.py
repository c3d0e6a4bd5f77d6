"""Training events: small records passed to an event listener while a run trains."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from manyformer.models import Model


class TrainingStarted(NamedTuple):
    """Training starts; `summary_lines` are pairs (subject, line of text) about data, model, device and folder."""

    summary_lines: tuple[tuple[str, str], ...]
    out: Path


class TrainingProgress(NamedTuple):
    """Progress after a step: loss, learning rate, tokens per second, progress of the run from 0 to 1, seconds left.

    `logged` steps are those that also go into the metrics; events of other steps come a few times a second at most.
    `scores` are those of the training data, if it has any, which say more than the loss. `data_wait` is the share of
    the time that was spent waiting for batches.
    """

    step: int
    steps: int | None
    loss: float
    learning_rate: float
    tokens_per_second: float
    progress: float
    seconds_left: float
    logged: bool
    scores: dict[str, float] = {}  # noqa: RUF012 - never changed
    data_wait: float = 0.0


class TrainingValidated(NamedTuple):
    """The validation data was scored; `best` says that no earlier score was better."""

    step: int
    scores: dict[str, float]
    best: bool
    seconds: float


class CheckpointSaved(NamedTuple):
    """A checkpoint was written to disk completely."""

    step: int
    folder: Path


class TrainingNote(NamedTuple):
    """A sentence for people, such as a damaged checkpoint that is skipped."""

    text: str


@dataclass(frozen=True)
class TrainResult:
    """A finished run: its folder, last step, end reason, chosen weights (in words) and their validation scores."""

    out: Path
    step: int
    reason: str
    chosen_weights: str
    scores: dict[str, float]

    def load(self) -> "Model":
        """Load the final model."""
        from manyformer.api import load

        return load(self.out / "model")


class TrainingFinished(NamedTuple):
    """The run has ended and the final model is saved; `next_commands` are commands that use the model."""

    result: TrainResult
    next_commands: tuple[str, ...]


TrainingEvent = (
    TrainingStarted | TrainingProgress | TrainingValidated | CheckpointSaved | TrainingNote | TrainingFinished
)
EventListener = Callable[[TrainingEvent], None]


def silent(event: TrainingEvent) -> None:
    """An event listener that ignores all events."""


def broadcast(*listeners: EventListener) -> EventListener:
    """One listener that passes every event to all of `listeners`."""

    def notify(event: TrainingEvent) -> None:
        for listener in listeners:
            listener(event)

    return notify
