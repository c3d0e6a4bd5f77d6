"""The state of a run without its tensors, and what follows from it alone: its progress and its end.

A checkpoint holds the state, so that a resumed run ends at the same step. Steps count from 1."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from pydantic import ConfigDict

from manyformer.base.files.json_records import Count
from manyformer.config import RunConfig
from manyformer.config.training_sections import BatchConfig
from manyformer.models.scores import is_comparable


@dataclass
class MetricsWindow:
    """Sums over the steps since the last row of the metrics."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    nats: float = 0.0
    extra: float = 0.0
    targets: Count = 0
    tokens: Count = 0
    steps: Count = 0
    seconds: float = 0.0
    data_seconds: float = 0.0
    """The part of the seconds in which the main process waited for batches."""
    gradient_norm: float | None = None
    """The norm of the gradient in the latest step that was not skipped."""

    @property
    def data_wait(self) -> float:
        """The share of the time that was spent waiting for batches."""
        # a window may be empty, and its two clocks are not read at the same moment
        return min(1.0, self.data_seconds / max(self.seconds, 1e-9))

    @property
    def loss(self) -> float:
        """The mean loss over all targets, 0 if there were none; no number if every step was skipped."""
        if self.steps:
            return self.nats / max(1, self.targets)
        return math.nan


class RunAmounts(NamedTuple):
    """What a run has consumed of its limits."""

    step: Count = 0
    tokens: Count = 0
    epochs: float = 0.0
    seconds: float = 0.0
    cpu_seconds: float = 0.0


class RankedCheckpoint(NamedTuple):
    """A validated checkpoint; a smaller `sort_key` is better."""

    sort_key: float
    step: Count
    scores: dict[str, float]


@dataclass
class TrainState:
    """Counters of a run; `seconds` of training are summed over interruptions, `metrics_rows` counts rows of metrics,
    and `metrics_sum` is a hash of them.

    `cpu_seconds` is the CPU time of all threads and processes. `ranking` holds the best validated steps, best first.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    step: Count = 0
    tokens: Count = 0
    epochs: float = 0.0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    metrics_rows: Count = 0
    metrics_sum: str = ""
    last_evaluated_step: Count = 0
    evaluations_since_best: Count = 0
    reached_target: float | None = None
    """The `evaluate.target` that a validation has reached."""
    ranking: list[RankedCheckpoint] = field(default_factory=list)
    scores: dict[str, float] = field(default_factory=dict)
    window: MetricsWindow = field(default_factory=MetricsWindow)
    skipped_steps: Count = 0
    """The steps that changed nothing because a number was not finite (`optim.nonfinite`)."""
    overflowed_steps: Count = 0
    """The steps that changed nothing but the scale of the loss, because their numbers overflowed float16."""
    overflows_in_row: Count = 0
    """How many of the latest steps were such, one after the other."""
    branch: RunAmounts | None = None
    """What had been consumed where the run went on from the checkpoint of another one (`branch_from`)."""

    def __post_init__(self) -> None:
        # version 0.2.0 could rank a score that is not a number
        self.ranking = [entry for entry in self.ranking if is_comparable(entry.sort_key)]

    def record_scores(self, scores: dict[str, float], sort_key: float, *, keep: int) -> bool:
        """Record this step's scores, keep the `keep` best steps, and return whether this one is the best so far.

        A score that is not finite is never the best and takes no place among those that are kept.
        """
        self.last_evaluated_step = self.step
        self.scores = scores
        if not is_comparable(sort_key):
            self.evaluations_since_best += 1
            return False
        best = not self.ranking or sort_key < self.ranking[0].sort_key
        self.evaluations_since_best = 0 if best else self.evaluations_since_best + 1
        # at least one entry, to know the best score; a stable sort leaves the earlier of equals in front
        ranking = [*self.ranking, RankedCheckpoint(sort_key, self.step, scores)]
        self.ranking = sorted(ranking, key=lambda entry: entry.sort_key)[: max(1, keep)]
        return best

    @property
    def amounts(self) -> RunAmounts:
        """What the run has consumed of its limits."""
        return RunAmounts(self.step, self.tokens, self.epochs, self.seconds, self.cpu_seconds)

    def begin_branch(self) -> None:
        """Go on as another run, which has no metrics, evaluations and checkpoints yet."""
        self.branch = self.amounts
        self.metrics_rows = 0
        self.metrics_sum = ""
        self.evaluations_since_best = 0
        self.reached_target = None
        self.ranking = []


def run_progress(run: RunConfig, train_state: TrainState | RunAmounts) -> float:
    """The completed fraction of the run, 0 to 1, by the limit that is nearest."""
    # the last step may go beyond a limit of tokens or time
    return min(1.0, max(amount / limit for _, amount, limit in _limits(run, train_state)))


def passes_of_step(batch: BatchConfig, train_state: TrainState) -> int:
    """The passes of the next step, whose gradients are summed: fewer in a warm-up of the batch size."""
    if batch.start is None:
        return batch.accumulate
    if batch.warmup_steps is not None:
        done, warmup = train_state.step, batch.warmup_steps
    else:
        assert batch.warmup_tokens is not None
        done, warmup = train_state.tokens, batch.warmup_tokens
    return batch.start + (batch.accumulate - batch.start) * min(done, warmup) // warmup


def end_reason(run: RunConfig, train_state: TrainState) -> str | None:
    """Why the run has ended; None while it has not."""
    for name, amount, limit in _limits(run, train_state):
        if amount >= limit:
            return f"limits.{name} {limit if isinstance(limit, int) else format(limit, 'g')} reached"
    patience = run.evaluate.patience
    if patience is not None and train_state.evaluations_since_best >= patience:
        count = train_state.evaluations_since_best
        return f"{count} evaluations in a row without a better one (evaluate.patience {patience})"
    target = run.evaluate.target
    if target is not None and train_state.reached_target == target:
        return f"{run.evaluate.metric} of {target:g} reached (evaluate.target)"
    return None


def _limits(run: RunConfig, train_state: TrainState | RunAmounts) -> Iterator[tuple[str, float, float]]:
    """Yield the name of each limit of the run, the consumed amount and the limit."""
    consumed = {
        "steps": train_state.step,
        "epochs": train_state.epochs,
        "tokens": train_state.tokens,
        "minutes": train_state.seconds / 60,
        "cpu_minutes": train_state.cpu_seconds / 60,
    }
    for name, limit in run.limits:
        if limit is not None:
            yield name, consumed[name], limit
