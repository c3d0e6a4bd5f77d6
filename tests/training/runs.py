"""Carrying out tiny runs, as a whole or stopped on the way."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fakes import opener

from manyformer.base.errors import TrainingInterrupted
from manyformer.base.system import StopSignal
from manyformer.config import RunConfig
from manyformer.training.events import TrainingEvent, TrainingNote, TrainingProgress, TrainResult
from manyformer.training.metrics import TIME_COLUMNS
from manyformer.training.run_folder import locked_folder
from manyformer.training.session import DataOpener, TrainingSession


class Heard(list[TrainingEvent]):
    """All events, and what to do on some."""

    def __init__(self, on_step: Callable[[int], None] = lambda step: None) -> None:
        super().__init__()
        self.on_step = on_step

    def __call__(self, event: TrainingEvent) -> None:
        self.append(event)
        if isinstance(event, TrainingProgress):
            self.on_step(event.step)

    @property
    def notes(self) -> str:
        return "\n".join(event.text for event in self if isinstance(event, TrainingNote))


def go(
    run: RunConfig, heard: Heard | None = None, *, wish: StopSignal | None = None, opened: DataOpener = opener
) -> TrainResult:
    """The run to its end, or as far as it gets."""
    assert run.out is not None
    out = Path(run.out)
    wish = StopSignal() if wish is None else wish
    with locked_folder(out):
        return TrainingSession(run, out, Heard() if heard is None else heard, wish, opened).train()


def stopped(run: RunConfig, step: int, *, opened: DataOpener = opener) -> str:
    """The run until somebody asks to stop after `step`; what is said then."""
    wish = StopSignal()

    def ask(now: int) -> None:
        if now == step:
            wish.signal_name = "SIGINT"

    try:
        go(run, Heard(ask), wish=wish, opened=opened)
    except TrainingInterrupted as stop:
        return str(stop)
    raise AssertionError("the run was not stopped")


def learned(out: Path) -> list[dict[str, Any]]:
    """The rows of the metrics, without what depends on the clock."""
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k not in TIME_COLUMNS} for row in rows]
