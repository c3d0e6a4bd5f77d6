"""How far a comparison is, in a line for people."""

import time
from collections.abc import Callable

from manyformer.train.events import EventListener, TrainingEvent, TrainingProgress
from manyformer.train.reporter import duration

LogFn = Callable[[str], None]


class ProgressMeter:
    """Tells `each` of every glimpse and `tell` of every training that ended; `total` trainings are left to do."""

    def __init__(self, total: int, each: LogFn, tell: LogFn) -> None:
        self.total, self.done = total, 0
        self._each, self.tell = each, tell
        self._begun = time.perf_counter()

    def listener(self, name: str) -> EventListener:
        """Hears the events of the training called `name`."""

        def hear(event: TrainingEvent) -> None:
            if isinstance(event, TrainingProgress):
                self.glimpse(f"{name}: step {event.step}, loss {event.loss:.3f}", event.share)

        return hear

    def glimpse(self, what: str, share: float = 0.0) -> None:
        """Something goes on, of whose training `share` is done."""
        self._each(f"{what}; {self._number()}, {self._left(share)} left")

    def ended(self, what: str) -> None:
        """A training is over and scored."""
        self.done += 1
        left = f", {self._left(0.0)} left" if self.done < self.total else ""
        self.tell(f"{what}; {self.done} of {self.total} trained{left}")

    def _number(self) -> str:
        return f"{min(self.done + 1, self.total)} of {self.total}"

    def _left(self, share: float) -> str:
        """The time left, if all trainings are as long as those so far."""
        behind = (self.done + share) / max(1, self.total)
        passed = time.perf_counter() - self._begun
        return duration(passed * (1 - behind) / behind if behind else float("inf"))
