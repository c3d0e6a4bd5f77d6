"""Training events: small records for the listeners of a run, of which some write lines, and one draws a bar."""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TextIO

from manyformer.base.files.atomic_files import append_bytes, report_disk_full
from manyformer.base.files.text_tables import printable_line

if TYPE_CHECKING:
    from rich.progress import Progress

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
    """The validation data was scored; `best` says that no earlier score was better.

    `bounds` are the scores of which the true value is at most the one computed."""

    step: int
    scores: dict[str, float]
    best: bool
    seconds: float
    bounds: frozenset[str] = frozenset()


class CheckpointSaved(NamedTuple):
    """A checkpoint was written to disk completely."""

    step: int
    folder: Path


class TrainingNote(NamedTuple):
    """A sentence for people, such as a damaged checkpoint that is skipped."""

    text: str


@dataclass(frozen=True)
class TrainResult:
    """A finished run: its folder, last step, end reason, chosen weights (in words) and their validation scores.

    `bounds` are the scores of which the true value is at most the one computed."""

    out: Path
    step: int
    reason: str
    chosen_weights: str
    scores: dict[str, float]
    bounds: frozenset[str] = frozenset()

    def load(self) -> "Model":
        """Load the final model."""
        from manyformer.conversion import load

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


SHOWN_DATA_WAIT = 0.1
"""The share of the time spent waiting for data from which lines of progress tell it."""


def reporter(stream: TextIO | None = None) -> EventListener:
    """A progress bar if `stream` (standard output by default) is a terminal, else plain lines."""
    stream = sys.stdout if stream is None else stream
    if stream.isatty():
        return LiveReporter(stream)
    return line_reporter(stream)


def format_event(event: TrainingEvent) -> list[str]:
    """Format an event as plain lines, empty for events that are not printed; the first word is the kind of line.

    Control characters, as names of files may hold them, are escaped.
    """
    return [printable_line(line) for line in _event_lines(event)]


def _event_lines(event: TrainingEvent) -> list[str]:
    match event:
        case TrainingStarted():
            return [f"{subject:<8} {text}" for subject, text in event.summary_lines]
        case TrainingProgress():
            if event.logged:
                return [_format_progress(event)]
            return []
        case TrainingValidated():
            best = " (best)" if event.best else ""
            return [f"valid    step {event.step}  {format_scores(event.scores, event.bounds)}{best}"]
        case CheckpointSaved():
            return []
        case TrainingNote():
            return [f"note     {event.text}"]
        case TrainingFinished():
            result = event.result
            scores = format_scores(result.scores, result.bounds)
            model_line = f"model    {result.chosen_weights}  {scores}  → {result.out / 'model'}"
            commands = [f"{'next' if number == 0 else '':<8} {line}" for number, line in enumerate(event.next_commands)]
            return [f"done     step {result.step}: {result.reason}", model_line, *commands]


def format_scores(scores: dict[str, float], bounds: frozenset[str]) -> str:
    """Format scores in one line, with a sign before those that are `bounds`."""
    units = {"loss": " nats"}
    return "  ".join(
        f"{name.replace('_', ' ')} {'<= ' if name in bounds else ''}{value:.4f}{units.get(name, '')}"
        for name, value in scores.items()
    )


def _format_progress(event: TrainingProgress) -> str:
    total = "" if event.steps is None else f"/{event.steps}"
    scores = "  ".join(f"{name.replace('_', ' ')} {value:.4g}" for name, value in event.scores.items())
    data_wait = ""
    if event.data_wait >= SHOWN_DATA_WAIT:
        data_wait = f"  data wait {event.data_wait:.0%}"
    return (
        f"step     {event.step}{total}  {scores or f'loss {event.loss:.4f}'}  lr {event.learning_rate:.3g}  "
        f"{event.tokens_per_second:.0f} tokens/s{data_wait}  left {format_duration(event.seconds_left)}"
    )


def format_duration(seconds: float) -> str:
    """Format seconds as h:mm:ss or m:ss; ? if they are not finite."""
    if not math.isfinite(seconds):
        return "?"
    minutes, remainder = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02}:{remainder:02}"
    return f"{minutes}:{remainder:02}"


def line_reporter(stream: TextIO) -> EventListener:
    """A listener that prints plain lines and flushes each."""

    def report(event: TrainingEvent) -> None:
        for line in format_event(event):
            print(line, file=stream, flush=True)

    return report


def log_file_reporter(path: Path) -> EventListener:
    """A listener that appends the plain lines to a file of the run folder."""

    def report(event: TrainingEvent) -> None:
        if lines := format_event(event):
            # a log that cannot grow ends the run with the sentence of a full disk
            with report_disk_full(f"the log {path}"):
                append_bytes(path, "".join(f"{line}\n" for line in lines).encode())

    return report


class LiveReporter:
    """Draws a progress bar in place, with all other lines above it."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console

        self._console = Console(file=stream, highlight=False)
        self._bar: Progress | None = None

    def __call__(self, event: TrainingEvent) -> None:
        if isinstance(event, TrainingProgress):
            self._update_bar(event)
            return
        if isinstance(event, TrainingFinished):
            self.close()
        for line in format_event(event):
            # names of files may hold brackets, which rich would read as markup
            self._console.print(line, soft_wrap=True, markup=False)

    def close(self) -> None:
        """Stop drawing the bar and release the terminal."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _update_bar(self, event: TrainingProgress) -> None:
        from rich.progress import BarColumn, Progress, TextColumn

        # with the first progress, so that notes before it need no redrawing
        if self._bar is None:
            text_column = TextColumn("step {task.fields[text]}", markup=False)
            self._bar = Progress(BarColumn(bar_width=24), text_column, console=self._console)
            self._bar.add_task("", total=1.0, text="")
            self._bar.start()
        # the bar has a single task
        (task,) = self._bar.task_ids
        self._bar.update(task, completed=event.progress, text=_format_progress(event).removeprefix("step").strip())
