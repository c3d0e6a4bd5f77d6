"""Progress lines of a running comparison."""

import time

from manyformer.train.events import EventListener, TrainingEvent, TrainingProgress
from manyformer.train.reporter import format_duration
from manyformer.type_aliases import LogFn


class TaskProgress:
    """Lines about one training, for `on_progress`."""

    def __init__(self, on_progress: LogFn) -> None:
        self._on_progress = on_progress

    def listener(self, name: str) -> EventListener:
        """A listener for the events of the training called `name`."""

        def on_event(event: TrainingEvent) -> None:
            if isinstance(event, TrainingProgress):
                self.report_progress(f"{name}: step {event.step}, loss {event.loss:.3f}", event.progress)

        return on_event

    def report_progress(self, activity: str, fraction: float = 0.0) -> None:
        """Report the current activity; `fraction` is the completed share of the current training."""
        self._on_progress(activity)


class ProgressMeter(TaskProgress):
    """Counts the finished trainings of a comparison and estimates the time left.

    `on_progress` gets a line for every progress event, `log` one for every finished training; `total` trainings are to
    be done.
    """

    def __init__(self, total: int, on_progress: LogFn, log: LogFn) -> None:
        self.total, self.completed = total, 0
        super().__init__(on_progress)
        self.log = log
        self._started = time.perf_counter()

    def report_progress(self, activity: str, fraction: float = 0.0) -> None:
        """Report the current activity; `fraction` is the completed share of the current training."""
        current = f"{min(self.completed + 1, self.total)} of {self.total}"
        super().report_progress(f"{activity}; {current}, {self._time_left(fraction)} left")

    def finish_training(self, outcome: str) -> None:
        """Count a training that is finished and scored, and log its outcome."""
        self.completed += 1
        remaining = f", {self._time_left(0.0)} left" if self.completed < self.total else ""
        self.log(f"{outcome}; {self.completed} of {self.total} trained{remaining}")

    def _time_left(self, fraction: float) -> str:
        """The time left, estimated from the mean duration of the trainings so far."""
        completed = (self.completed + fraction) / max(1, self.total)
        elapsed = time.perf_counter() - self._started
        return format_duration(elapsed * (1 - completed) / completed if completed else float("inf"))
