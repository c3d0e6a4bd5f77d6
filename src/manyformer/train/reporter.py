"""What a person sees of a run: a live bar on a terminal, plain lines elsewhere, and the same lines in log.txt."""

import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from manyformer.train.durable_files import room_for
from manyformer.train.events import (
    CheckpointSaved,
    EventListener,
    TrainingEvent,
    TrainingFinished,
    TrainingNote,
    TrainingProgress,
    TrainingStarted,
    TrainingValidated,
)

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID


def reporter(stream: TextIO | None = None) -> EventListener:
    """The live bar where `stream` (standard output by default) is a terminal, else plain lines."""
    stream = sys.stdout if stream is None else stream
    return LiveReporter(stream) if stream.isatty() else LineReporter(stream)


def as_lines(event: TrainingEvent) -> list[str]:
    """An event as plain lines, empty where there is nothing to say; a line's first word says what it is."""
    match event:
        case TrainingStarted():
            return [f"{subject:<8} {text}" for subject, text in event.lines]
        case TrainingProgress():
            return [_progress(event)] if event.logged else []
        case TrainingValidated():
            best = " (best)" if event.best else ""
            return [f"valid    step {event.step}  {in_words(event.scores)}{best}"]
        case CheckpointSaved():
            return []
        case TrainingNote():
            return [f"note     {event.text}"]
        case TrainingFinished():
            chosen = f"model    {event.chosen}  {in_words(event.scores)}  → {event.out / 'model'}"
            commands = [f"{'next' if number == 0 else '':<8} {line}" for number, line in enumerate(event.next_commands)]
            return [f"done     step {event.step}: {event.why}", chosen, *commands]


def in_words(scores: dict[str, float]) -> str:
    """Scores in one line."""
    parts = []
    for name, value in scores.items():
        unit = " nats" if name == "loss" else ""
        parts.append(f"{name.replace('_', ' ')} {value:.4f}{unit}")
    return "  ".join(parts)


def _progress(event: TrainingProgress) -> str:
    of = "" if event.steps is None else f"/{event.steps}"
    return (
        f"step     {event.step}{of}  loss {event.loss:.4f}  lr {event.learning_rate:.3g}  "
        f"{event.tokens_per_second:.0f} tokens/s  left {duration(event.left)}"
    )


def duration(seconds: float) -> str:
    """Seconds as h:mm:ss or m:ss; ? where they are unknown."""
    if not math.isfinite(seconds):
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class LineReporter:
    """Plain lines, each on its way when it is written."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __call__(self, event: TrainingEvent) -> None:
        for line in as_lines(event):
            print(line, file=self._stream, flush=True)


class LogFileReporter:
    """The plain lines in a file of the run's folder, after those of earlier parts of the run."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __call__(self, event: TrainingEvent) -> None:
        lines = as_lines(event)
        if lines:
            with room_for(f"the log {self._path}"), self._path.open("a", encoding="utf-8") as file:
                file.write("".join(f"{line}\n" for line in lines))


class LiveReporter:
    """A bar that is redrawn in place, with all other lines above it."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console

        self._console = Console(file=stream, highlight=False)
        self._bar: Bar | None = None
        self._task: TaskID | None = None

    def __call__(self, event: TrainingEvent) -> None:
        if isinstance(event, TrainingProgress):
            self._move(event)
            return
        if isinstance(event, TrainingFinished):
            self.close()
        for line in as_lines(event):
            self._console.print(line, soft_wrap=True, markup=False)

    def close(self) -> None:
        """Leave the bar as it is and give the terminal back."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _move(self, event: TrainingProgress) -> None:
        if self._bar is None:
            self._open()
        assert self._bar is not None
        assert self._task is not None
        self._bar.update(self._task, completed=event.share, text=_progress(event).removeprefix("step").strip())

    def _open(self) -> None:
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as Bar

        self._bar = Bar(
            BarColumn(bar_width=24), TextColumn("step {task.fields[text]}", markup=False), console=self._console
        )
        self._task = self._bar.add_task("", total=1.0, text="")
        self._bar.start()
