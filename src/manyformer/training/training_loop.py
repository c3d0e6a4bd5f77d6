"""The training loop: steps, metrics, evaluations and checkpoints in an order that does not depend on interruptions."""

import itertools
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NoReturn

import torch

from manyformer.base.errors import TrainingInterrupted, UserError
from manyformer.base.system import StopSignal
from manyformer.config import RunConfig
from manyformer.data.batching.epochs import TrainingFeed
from manyformer.models.scores import is_comparable
from manyformer.nn.batches import Batch
from manyformer.nn.runtime.devices import device_kind, report_missing_operator, report_out_of_memory
from manyformer.nn.runtime.training_hooks import (
    PostStepUpdate,
    TracksProgress,
    run_post_step_updates,
    set_training_progress,
)
from manyformer.training.checkpoints import Checkpoint, CheckpointWriter
from manyformer.training.engine import MAX_OVERFLOWS_IN_ROW, MovementWatch, StepResult, TrainingEngine
from manyformer.training.events import CheckpointSaved, EventListener, TrainingNote, TrainingProgress, TrainingValidated
from manyformer.training.metrics import MetricsRow, MetricsSink, extend_sum, finite_row
from manyformer.training.schedules import LearningRateFn
from manyformer.training.train_state import MetricsWindow, TrainState, end_reason, passes_of_step, run_progress
from manyformer.training.validation import Validator

PROGRESS_SECONDS = 0.2
"""The shortest time between progress events of steps that are not in the metrics."""

MEASURED_SECONDS = 10.0
"""How long a single process on a CPU is watched for threads that wait."""

LEAST_USE = 0.7
"""Seconds of computation in a second, by all threads, below which a single thread may be faster than several."""


class TrainingDiverged(UserError):
    """The loss, the gradient or a weight is no longer finite."""


@dataclass
class TrainingLoop:
    """Trains one run from its current train state to its end."""

    run: RunConfig
    engine: TrainingEngine
    feed: TrainingFeed
    validator: Validator
    learning_rate: LearningRateFn
    checkpoint_writer: CheckpointWriter
    sinks: Sequence[MetricsSink]
    on_event: EventListener
    stop_signal: StopSignal
    train_state: TrainState = field(default_factory=TrainState)

    def __post_init__(self) -> None:
        # waiting for the device at every step is free on a CPU and expensive on a GPU
        if device_kind(self.engine.device).is_host:
            self._sync_every = 1
        else:
            self._sync_every = self.run.log.every
        self._pending_steps: list[StepResult] = []
        self._start_time = self._last_report_time = self._last_tick_time = time.perf_counter()
        self._last_cpu_time = time.process_time()
        self._start_progress = 0.0
        self.step_progress = 1.0
        """The progress of the run before its last step; 1 before any step."""
        self._last_loss = math.nan
        self._checkpointed: tuple[int, int] | None = None
        """The step of the latest checkpoint, and the step that had been evaluated last."""
        self._process_group = self.engine.process_group
        # to look for them takes a twentieth of a step of a tiny model
        modules = list(self.engine.model.modules())
        self._tracks_progress = any(isinstance(module, TracksProgress) for module in modules)
        self._updates_itself = any(isinstance(module, PostStepUpdate) for module in modules)
        self._movement = MovementWatch(self.engine.weights)
        self._start_seconds = self._start_cpu_seconds = 0.0
        # a GPU lets the host wait, and several processes wait for one another
        self._thread_use_reported = self.engine.device.type != "cpu" or self._process_group.size > 1

    def resume(self, checkpoint: Checkpoint) -> None:
        """Restore this checkpoint and continue exactly from it."""
        self.train_state = self.checkpoint_writer.read(checkpoint)
        self._checkpointed = checkpoint.step, self.train_state.last_evaluated_step
        self._check_finite_tensors()

    def begin_branch(self, checkpoint: Checkpoint) -> None:
        """Go on from the checkpoint of another run; this run has it too, before its first step.

        Raises UserError if this run would end where it begins."""
        self.train_state = self.checkpoint_writer.read(checkpoint)
        self.train_state.begin_branch()
        if reason := end_reason(self.run, self.train_state):
            remedy = "set a greater limit, which counts from the beginning of that run"
            raise UserError(f"branch_from: {checkpoint.folder} is where this run ends already ({reason}); {remedy}")
        self.checkpoint()

    def train(self) -> str:
        """Train to the end and return the reason. Raises TrainingInterrupted, TrainingDiverged or DiskFull."""
        self._start_time = self._last_report_time = self._last_tick_time = time.perf_counter()
        self._last_cpu_time = time.process_time()
        # a resumed run estimates its remaining time by its speed since then
        self._start_progress = run_progress(self.run, self.train_state)
        self._movement.begin()
        self._start_seconds, self._start_cpu_seconds = self.train_state.seconds, self.train_state.cpu_seconds

        def work() -> str:
            return f"in training step {self.train_state.step + 1}"

        with report_out_of_memory(work, _smaller_step(self.run)), report_missing_operator(self.run.recipe):
            return self._train_to_end()

    def _train_to_end(self) -> str:
        while True:
            # the same order at every step, also at the one that a run resumes from: completed work is not due again
            self._evaluate(due=self._is_due(self.run.evaluate.every))
            reason = end_reason(self.run, self.train_state)
            self._evaluate(due=reason is not None)
            self._save(due=reason is not None or self._is_due(self.run.save.every))
            if not self._pending_steps and self._process_group.any_process(self.stop_signal.signal_name):
                self._interrupt()
            if reason is not None:
                self._report_skipped()
                return reason
            self._take_step()

    def _is_due(self, steps: int | None) -> bool:
        return steps is not None and self.train_state.step > 0 and self.train_state.step % steps == 0

    def _add_elapsed_time(self, numbers: Sequence[float] = ()) -> tuple[float, list[float]]:
        """Add the time since the last call to the train state; returns the elapsed wall time in seconds.

        With it come the sums of `numbers` over all processes, which are added up together with the times."""
        wall_time = time.perf_counter()
        cpu_time = time.process_time()
        elapsed = wall_time - self._last_tick_time
        cpu_elapsed = cpu_time - self._last_cpu_time
        self._last_tick_time = wall_time
        self._last_cpu_time = cpu_time
        # one clock for all processes: they must agree on when to end
        own_time = elapsed if self._process_group.rank == 0 else 0.0
        elapsed, cpu_elapsed, *sums = self._process_group.sum_numbers([own_time, cpu_elapsed, *numbers])
        self.train_state.seconds += elapsed
        self.train_state.cpu_seconds += cpu_elapsed
        return elapsed, sums

    def _take_step(self) -> None:
        """Make one optimizer step, and report it if it is due."""
        train_state = self.train_state
        run = self.run
        feed = self.feed
        batches = self._take_batches()
        self.step_progress = run_progress(run, train_state)
        # before the step, so that layers see the progress of the steps that are done
        if self._tracks_progress:
            set_training_progress(self.engine.model, self.step_progress)
        self._current_rate = self.learning_rate(train_state.step + 1, self.step_progress)
        result = self.engine.step(batches, self._current_rate)
        self._pending_steps.append(result)
        train_state.step += 1
        self._movement.count_step(self._current_rate)
        if self._updates_itself:
            run_post_step_updates(self.engine.model, train_state.step)
        if self.engine.average is not None:
            self.engine.average.update(train_state.step)
        train_state.tokens += result.tokens
        train_state.epochs = feed.epoch + feed.batch / feed.batches
        if len(self._pending_steps) >= self._sync_every or self._needs_sync():
            self._collect_pending()

    def _take_batches(self) -> list[Batch]:
        """The batches of a step; the time until they are there is time without training."""
        start_time = time.perf_counter()
        batches = [next(self.feed) for _ in range(passes_of_step(self.run.batch, self.train_state))]
        self.train_state.window.data_seconds += time.perf_counter() - start_time
        return batches

    def _needs_sync(self) -> bool:
        run = self.run
        # what is due after this step needs the results of all steps up to it
        due = (run.log.every, run.evaluate.every, run.save.every)
        return any(map(self._is_due, due)) or end_reason(run, self.train_state) is not None

    def _collect_pending(self) -> None:
        """Wait for the results of pending steps, check them, and add them to the metrics window."""
        window = self.train_state.window
        pending = self._pending_steps
        local_figures: list[list[float]] = torch.stack([step.figures for step in pending]).tolist()
        seconds, sums = self._add_elapsed_time(list(itertools.chain.from_iterable(local_figures)))
        # the four figures of each step again, as in `StepResult.figures`
        rows = list(zip(*[iter(sums)] * 4, strict=True))
        self._pending_steps = []
        first_step = self.train_state.step - len(rows) + 1
        for number, ((loss, extra, norm, overflow), result) in enumerate(zip(rows, pending, strict=True)):
            step = first_step + number
            window.tokens += result.tokens
            if overflow > 0:
                self._count_overflow(step)
                continue
            self.train_state.overflows_in_row = 0
            if result.skipped:
                self._count_skipped(step, loss, norm)
                continue
            self._check_finite(step, loss + extra, norm, result)
            window.nats += loss * result.targets
            window.extra += extra
            window.targets += result.targets
            window.steps += 1
            window.gradient_norm = norm
            self._last_loss = loss
        window.seconds += seconds
        self._report_thread_use()
        self._report_progress(window)

    def _report_thread_use(self) -> None:
        """Say once, after the first seconds of a single process on a CPU, if its threads mostly wait."""
        seconds = self.train_state.seconds - self._start_seconds
        if self._thread_use_reported or seconds < MEASURED_SECONDS:
            return
        self._thread_use_reported = True
        cpu_seconds = self.train_state.cpu_seconds - self._start_cpu_seconds
        if text := describe_waiting_threads(seconds, cpu_seconds, torch.get_num_threads()):
            self.on_event(TrainingNote(text))

    def _check_finite(self, step: int, loss: float, norm: float, result: StepResult) -> None:
        if not math.isfinite(loss):
            self._raise_diverged(f"the loss is {loss}", step)
        if norm <= result.largest_norm:
            return
        name = self.engine.name_of_gradient(result)
        detail = "" if name is None else f" (first that of {name})"
        if math.isfinite(norm):
            detail += f", more than the {result.largest_norm:.2g} whose square the optimizer can hold"
        self._raise_diverged(f"the norm of the gradient is {norm:g}", step, detail)

    def _count_skipped(self, step: int, loss: float, norm: float) -> None:
        """Count a step that has changed nothing; the first one is told."""
        self.train_state.skipped_steps += 1
        if self.train_state.skipped_steps == 1:
            problem = f"step {step} was skipped: its loss is {loss:g} and the norm of its gradient {norm:g}"
            self.on_event(TrainingNote(f"{problem}; the run goes on with the same weights (optim.nonfinite=skip)"))

    def _count_overflow(self, step: int) -> None:
        """Count a step that the scaler of the loss has skipped; the first one is told, and too many end the run."""
        train_state = self.train_state
        train_state.overflowed_steps += 1
        train_state.overflows_in_row += 1
        if train_state.overflowed_steps == 1:
            problem = f"step {step} was skipped: its numbers overflowed float16"
            self.on_event(TrainingNote(f"{problem}; the scale of the loss is halved, which the first steps often need"))
        if train_state.overflows_in_row < MAX_OVERFLOWS_IN_ROW:
            return
        problem = f"{MAX_OVERFLOWS_IN_ROW} steps in a row overflow float16 at any scale of the loss, the last of them"
        self._raise_diverged(problem, step, remedy="set precision=bfloat16 or float32, or try a lower learning rate")

    def _raise_diverged(self, problem: str, step: int, detail: str = "", remedy: str | None = None) -> NoReturn:
        store = self.checkpoint_writer.store
        steps = store.steps()
        last = "no checkpoint was written"
        if steps:
            last = f"the last good checkpoint is {store.path(steps[-1])}"
        if remedy is None:
            remedy = "try a lower learning rate, a longer warm-up or optim.max_grad_norm"
            if self.run.optim.nonfinite == "stop":
                remedy += ", or go on without such steps (optim.nonfinite=skip)"
        raise TrainingDiverged(f"{problem} at step {step}{detail}; {last}; {remedy}")

    def _report_progress(self, window: MetricsWindow) -> None:
        current_time = time.perf_counter()
        logged = self._is_due(self.run.log.every)
        if not logged and current_time - self._last_report_time < PROGRESS_SECONDS:
            return
        self._last_report_time = current_time
        train_state = self.train_state
        speed = window.tokens / max(window.seconds, 1e-9)
        progress = run_progress(self.run, train_state)
        completed = progress - self._start_progress
        seconds_left = math.nan
        if completed > 0:
            seconds_left = (current_time - self._start_time) * (1 - progress) / completed
        loss = window.loss if logged else self._last_loss
        steps = self.run.limits.steps
        self.on_event(
            TrainingProgress(
                train_state.step,
                steps,
                loss,
                self._current_rate,
                speed,
                progress,
                seconds_left,
                logged=logged,
                data_wait=window.data_wait,
                scores=self.feed.progress_scores(),
            )
        )
        if logged:
            self._write_row(self._training_row(window, speed))
            train_state.window = MetricsWindow()

    def _training_row(self, window: MetricsWindow, speed: float) -> MetricsRow:
        row: MetricsRow = {
            "epoch": round(self.train_state.epochs, 6),
            "loss": window.loss,
            "learning_rate": self._current_rate,
            "tokens_per_second": round(speed, 1),
            "data_wait": round(window.data_wait, 3),
        }
        row.update(self.feed.training_scores())
        if window.extra:
            row["extra"] = window.extra / window.steps
        if self.engine.max_grad_norm is not None:
            row["gradient_norm"] = window.gradient_norm
        return row

    def _write_row(self, row: MetricsRow) -> None:
        train_state = self.train_state
        train_state.metrics_rows += 1
        common = {"step": train_state.step, "tokens": train_state.tokens, "seconds": round(train_state.seconds, 3)}
        row = finite_row({**common, **row})
        train_state.metrics_sum = extend_sum(train_state.metrics_sum, row)
        for sink in self.sinks:
            sink.add(row)

    def _evaluate(self, *, due: bool) -> None:
        train_state = self.train_state
        if not due or train_state.last_evaluated_step == train_state.step or not self.validator.has_data:
            return
        start_time = time.perf_counter()
        work = f"in the evaluation of step {train_state.step}"
        with (
            report_out_of_memory(work, _smaller_step(self.run)),
            report_missing_operator(self.run.recipe),
            self.engine.scored_weights(),
        ):
            # all processes must agree to stop, because they score the data together
            scores = self.validator(lambda: self._process_group.any_process(self.stop_signal.signal_name))
        self._add_elapsed_time()
        if scores is None:
            self._interrupt()
        if self.validator.reaches_target(scores):
            train_state.reached_target = self.run.evaluate.target
        best = train_state.record_scores(scores, self.validator.sort_key(scores), keep=self.run.save.keep_best)
        metric = self.validator.metric
        if not is_comparable(scores[metric]):
            problem = f"the validation {metric} of step {train_state.step} is {scores[metric]:g}"
            self.on_event(TrainingNote(f"{problem}, which is no finite number: this step is never the best"))
        self._write_row({f"valid_{name}": value for name, value in scores.items()})
        seconds = time.perf_counter() - start_time
        self.on_event(TrainingValidated(train_state.step, scores, best, seconds, self.validator.bounds))

    def _save(self, *, due: bool) -> None:
        step = self.train_state.step
        store = self.checkpoint_writer.store
        # a step that scored well is saved at once, also between scheduled checkpoints
        ranked = {entry.step for entry in self.train_state.ranking[: self.run.save.keep_best]}
        if step == 0 or not (due or step in ranked):
            return
        self.checkpoint()
        self._report_standstill()
        store.remove_except({step, *self.scheduled_steps()[-self.run.save.keep_last :], *ranked})

    def scheduled_steps(self) -> list[int]:
        """The steps of checkpoints that the run schedules, without those of interruptions and good scores."""
        last_step = None
        if end_reason(self.run, self.train_state) is not None:
            last_step = self.train_state.step
        steps = self.checkpoint_writer.store.steps()
        return [step for step in steps if step % self.run.save.every == 0 or step == last_step]

    def checkpoint(self) -> None:
        """Write the checkpoint of this step, unless it exists with the same evaluation.

        An interruption during an evaluation saves without it, and the run evaluates where it resumes.
        """
        train_state = self.train_state
        self._add_elapsed_time()
        self._check_finite_tensors()
        current = train_state.step, train_state.last_evaluated_step
        if current != self._checkpointed:
            self.checkpoint_writer.write(train_state)
            self._checkpointed = current
            self.on_event(CheckpointSaved(train_state.step, self.checkpoint_writer.store.path(train_state.step)))

    def _check_finite_tensors(self) -> None:
        """Refuse weights and an optimizer that are not finite: no checkpoint holds them, no run goes on with them."""
        names = self.engine.non_finite_tensors()
        if not self._process_group.any_process(names):
            return
        problem = "a number of another process is not finite"
        if names:
            others_text = " is"
            if len(names) > 1:
                others_text = f" and {len(names) - 1:,} more are"
            problem = f"{names[0]}{others_text} not finite"
        # tensors of the optimizer are called NAME/KIND, weights have no slash
        if not any("/" not in name for name in names):
            problem += ": weights with such a state of the optimizer never move again"
        self._raise_diverged(problem, self.train_state.step)

    def _report_standstill(self) -> None:
        """Say if the weights have not moved since the last look."""
        sentence = self._movement.describe_standstill(run_ends=end_reason(self.run, self.train_state) is not None)
        # a process may hold a shard that stands still while others move
        if not self._process_group.any_process(sentence is None) and sentence is not None:
            self.on_event(TrainingNote(sentence))

    def _report_skipped(self) -> None:
        if skipped := self.train_state.skipped_steps:
            problem = f"{skipped:,} of {self.train_state.step:,} steps were skipped: their numbers were not finite"
            self.on_event(TrainingNote(f"{problem}; a lower learning rate or optim.max_grad_norm may avoid them"))
        scaler = self.engine.loss_scaler
        if scaler is not None and (overflowed := self.train_state.overflowed_steps):
            problem = f"{overflowed:,} of {self.train_state.step:,} steps were skipped: they overflowed float16"
            self.on_event(TrainingNote(f"{problem}; the loss is now scaled by {scaler.state.scale:,g}"))

    def _interrupt(self) -> NoReturn:
        """Save a checkpoint and raise TrainingInterrupted."""
        if self._pending_steps:
            self._collect_pending()
        step = self.train_state.step
        if step:
            self.checkpoint()
        status = "stopped before the first step"
        if step:
            status = f"stopped at step {step}, saved"
        raise TrainingInterrupted(f"{status}. The same command continues.")


def _smaller_step(run: RunConfig) -> str:
    """The settings that reduce the memory of a step."""
    recompute = ", set activation_checkpointing=true"
    if run.activation_checkpointing:
        recompute = ""
    return (
        f"make batch.tokens (now {run.batch.tokens}) smaller, with a larger batch.accumulate{recompute}, or "
        "make the rows (data.length, or data.size of images) or the model (model.dim, model.depth) smaller"
    )


def describe_waiting_threads(seconds: float, cpu_seconds: float, threads: int) -> str | None:
    """A sentence if several threads computed less in this time than one could have, else None.

    Threads wait for each other at the end of each operation, so that a busy processor delays all of them. The number of
    threads is not changed, because it changes the last digits of results: a run that resumes would not repeat those of
    an uninterrupted one. Nothing is said if OMP_NUM_THREADS is set, which is then somebody's choice.
    """
    if threads < 2 or cpu_seconds >= LEAST_USE * seconds or "OMP_NUM_THREADS" in os.environ:
        return None
    problem = f"{threads} threads computed for {cpu_seconds:.1f} of the first {seconds:.1f} s and waited otherwise"
    remedy = "a run with OMP_NUM_THREADS=1 may be faster (its results differ in the last digits)"
    return f"{problem}, so other work seems to occupy the processor; {remedy}"
