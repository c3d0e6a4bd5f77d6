"""The training loop: steps, metrics, evaluations and checkpoints, in an order that an interruption cannot change."""

import itertools
import math
import time
from collections.abc import Sequence
from typing import NamedTuple, NoReturn, Protocol

import torch

from manyformer.config import RunConfig
from manyformer.errors import UserError
from manyformer.train.checkpoint_writer import CheckpointWriter
from manyformer.train.checkpoints import Checkpoint
from manyformer.train.data_protocols import TrainingFeed
from manyformer.train.engine import StepResult, TrainingEngine
from manyformer.train.events import CheckpointSaved, EventListener, TrainingProgress, TrainingValidated
from manyformer.train.metrics import MetricsRow
from manyformer.train.schedules import LearningRateFn
from manyformer.train.signals import StopSignal, TrainingInterrupted
from manyformer.train.train_state import MetricsWindow, TrainState, ended, share
from manyformer.train.validation import Validator
from manyformer.training_hooks import run_post_step_updates, set_training_progress

# How often at most a listener hears of a step that is not in the metrics, in seconds.
GLIMPSE = 0.2


class TrainingDiverged(UserError):
    """The loss or the gradient is not a number any more."""


class MetricsSink(Protocol):
    """Where rows of metrics go."""

    def add(self, row: MetricsRow) -> None: ...
    def close(self) -> None: ...


class LoopParts(NamedTuple):
    """All that the loop works with."""

    engine: TrainingEngine
    feed: TrainingFeed
    judge: Validator
    rate: LearningRateFn
    saver: CheckpointWriter
    sinks: Sequence[MetricsSink]
    tell: EventListener
    stop_signal: StopSignal


class TrainingLoop:
    """One run, from where it stands to its end."""

    def __init__(self, run: RunConfig, parts: LoopParts) -> None:
        self.run, self.parts, self.standing = run, parts, TrainState()
        # waiting for the device at every step costs nothing on a CPU and much elsewhere
        self._patience = 1 if parts.engine.device.type == "cpu" else run.log.every
        self._pending: list[StepResult] = []
        self._begun = self._glimpsed = self._mark = time.perf_counter()
        self._worked = time.process_time()
        self._behind = 0.0
        self._loss = self._norm = math.nan
        self._world = parts.engine.world

    def resume(self, checkpoint: Checkpoint) -> None:
        """Go on exactly where this checkpoint was written."""
        self.standing = self.parts.saver.read(checkpoint)

    def go(self) -> str:
        """Train until a limit is reached, and say which. Raises Interrupted, Diverged or DiskFull."""
        self._begun = self._glimpsed = self._mark = time.perf_counter()
        self._worked = time.process_time()
        self._behind = share(self.run, self.standing)
        while True:
            # in this order at every step, also at the one that a run goes on from: what is done already is not due
            self._evaluate(due=self._every(self.run.evaluate.every))
            why = ended(self.run, self.standing)
            self._evaluate(due=why is not None)
            self._save(due=why is not None or self._every(self.run.save.every))
            if why is not None:
                return why
            self._advance()
            if not self._pending and self._world.any(self.parts.stop_signal):
                self._interrupt()

    def _every(self, steps: int | None) -> bool:
        return steps is not None and self.standing.step > 0 and self.standing.step % steps == 0

    def _tick(self) -> float:
        """Seconds since the last tick, added to those of the run."""
        now, worked = time.perf_counter(), time.process_time()
        passed, labour = now - self._mark, worked - self._worked
        self._mark, self._worked = now, worked
        # one clock for all processes: they must agree on when to end
        passed, labour = self._world.sums([passed if self._world.first else 0.0, labour])
        self.standing.seconds += passed
        self.standing.processor += labour
        return passed

    def _advance(self) -> None:
        """One step, and a row of metrics where one is due."""
        standing, run, feed = self.standing, self.run, self.parts.feed
        batches = [next(feed) for _ in range(run.batch.accumulate)]
        behind = share(run, standing)
        set_training_progress(self.parts.engine.model, behind)
        self._rate = self.parts.rate(standing.step + 1, behind)
        stepped = self.parts.engine.step(batches, self._rate)
        self._pending.append(stepped)
        standing.step += 1
        run_post_step_updates(self.parts.engine.model, standing.step)
        standing.tokens += stepped.tokens
        standing.epochs = feed.epoch + feed.batch / feed.batches
        if len(self._pending) >= self._patience or self._duty():
            self._settle()

    def _duty(self) -> bool:
        run = self.run
        due = (run.log.every, run.evaluate.every, run.save.every)
        return any(map(self._every, due)) or ended(run, self.standing) is not None

    def _settle(self) -> None:
        """Wait for the steps that are under way, check them, and add them to the window."""
        window, pending = self.standing.window, self._pending
        ours: list[list[float]] = torch.stack([step.figures for step in pending]).tolist()
        sums = self._world.sums(list(itertools.chain.from_iterable(ours)))
        rows = list(zip(*[iter(sums)] * 3, strict=True))
        self._pending = []
        first = self.standing.step - len(rows) + 1
        for number, ((loss, extra, norm), (_, targets, tokens)) in enumerate(zip(rows, pending, strict=True)):
            self._check(first + number, loss + extra, norm)
            window.nats += loss * targets
            window.extra += extra
            window.targets += targets
            window.tokens += tokens
            window.steps += 1
            self._loss, self._norm = loss, norm
        window.seconds += self._tick()
        self._report(window)

    def _check(self, step: int, loss: float, norm: float) -> None:
        if math.isfinite(loss) and math.isfinite(norm):
            return
        self._diverged(
            f"the loss is {loss}" if not math.isfinite(loss) else f"the norm of the gradient is {norm}", step
        )

    def _diverged(self, what: str, step: int) -> NoReturn:
        store = self.parts.saver.store
        steps = store.steps()
        last = f"the last good checkpoint is {store.path(steps[-1])}" if steps else "no checkpoint was written"
        help = "try a lower learning rate, a longer warm-up or optim.clip"
        raise TrainingDiverged(f"{what} at step {step}; {last}; {help}")

    def _report(self, window: MetricsWindow) -> None:
        now = time.perf_counter()
        logged = self._every(self.run.log.every)
        if not logged and now - self._glimpsed < GLIMPSE:
            return
        self._glimpsed = now
        standing = self.standing
        speed = window.tokens / max(window.seconds, 1e-9)
        done = share(self.run, standing)
        left = (now - self._begun) * (1 - done) / (done - self._behind) if done > self._behind else math.nan
        loss = window.loss if logged else self._loss
        self.parts.tell(
            TrainingProgress(standing.step, self.run.limits.steps, loss, self._rate, speed, done, left, logged=logged)
        )
        if logged:
            self._row(self._training_row(window, speed))
            standing.window = MetricsWindow()

    def _training_row(self, window: MetricsWindow, speed: float) -> MetricsRow:
        row: MetricsRow = {
            "epoch": round(self.standing.epochs, 6),
            "loss": window.loss,
            "learning_rate": self._rate,
            "tokens_per_second": round(speed, 1),
        }
        if window.extra:
            row["extra"] = window.extra / window.steps
        if self.parts.engine.clip is not None:
            row["gradient_norm"] = self._norm
        return row

    def _row(self, row: MetricsRow) -> None:
        standing = self.standing
        standing.rows += 1
        common = {"step": standing.step, "tokens": standing.tokens, "seconds": round(standing.seconds, 3)}
        for sink in self.parts.sinks:
            sink.add({**common, **row})

    def _evaluate(self, *, due: bool) -> None:
        standing, parts = self.standing, self.parts
        if not due or standing.evaluated == standing.step:
            return
        begun = time.perf_counter()
        found = parts.judge(lambda: self._world.any(parts.stop_signal))
        self._tick()
        if found is None:
            self._interrupt()
        best = standing.rank(found, parts.judge.sort_key(found), keep=self.run.save.best)
        self._row({f"valid_{name}": value for name, value in found.items()})
        parts.tell(TrainingValidated(standing.step, found, best, time.perf_counter() - begun))

    def _save(self, *, due: bool) -> None:
        step, store = self.standing.step, self.parts.saver.store
        ranked = {entry.step for entry in self.standing.ranking[: self.run.save.best]}
        if step == 0 or not (due or step in ranked):
            return
        self.checkpoint()
        store.keep({step, *self.regular()[-self.run.save.last :], *ranked})

    def regular(self) -> list[int]:
        """The steps of the checkpoints that are due by the run alone, not by an interruption or a good score."""
        step, every = self.standing.step, self.run.save.every
        over = ended(self.run, self.standing) is not None
        return [one for one in self.parts.saver.store.steps() if one % every == 0 or (over and one == step)]

    def checkpoint(self) -> None:
        """Write the checkpoint of this step, unless it is there."""
        standing, parts = self.standing, self.parts
        self._tick()
        if not parts.engine.finite():
            self._diverged("the weights are not finite", standing.step)
        if parts.saver.write(standing):
            parts.tell(CheckpointSaved(standing.step, parts.saver.store.path(standing.step)))

    def _interrupt(self) -> NoReturn:
        """Save and say how to go on."""
        if self._pending:
            self._settle()
        step = self.standing.step
        if step:
            self.checkpoint()
        done = f"stopped at step {step}, saved" if step else "stopped before the first step"
        raise TrainingInterrupted(f"{done}. The same command continues.")
