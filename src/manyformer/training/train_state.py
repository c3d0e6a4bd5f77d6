"""The state of a run without its tensors, and what follows from it alone: its progress, its end, the learning rate.

A checkpoint holds the state, so that a resumed run ends at the same step and has the same learning rates. Steps count
from 1."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from pydantic import ConfigDict

from manyformer.base.files.json_records import Count
from manyformer.config import ConstantSchedule, CosineSchedule, NoamSchedule, RunConfig
from manyformer.models.scores import is_comparable

LearningRateFn = Callable[[int, float], float]
"""Maps the next step and the progress of the run before it (0 to 1) to the learning rate."""

DEFAULT_WARMUP_SHARE = 0.1
LARGEST_WARMUP_SHARE = 0.5
"""The largest share of a run without limits.steps that is warm-up, by default and with schedule.warmup."""

SHORTEST_WARMUP = 10
"""Steps of the shortest warm-up: the first steps may take long, and say little about the speed of the others."""


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


def run_progress(run: RunConfig, train_state: TrainState) -> float:
    """The completed fraction of the run, 0 to 1, by the limit that is nearest."""
    # the last step may go beyond a limit of tokens or time
    return min(1.0, max(amount / limit for _, amount, limit in _limits(run, train_state)))


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


def _limits(run: RunConfig, train_state: TrainState) -> Iterator[tuple[str, float, float]]:
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


class WarmUp(NamedTuple):
    """Linear warm-up over `steps` steps or over a `share` of the run, whichever ends first; None is for no share.

    The share is for runs that may end before their last step, by minutes for example. It is the one that the warm-up
    has by steps, so that it changes nothing while steps are the nearest limit, and shrinks the warm-up with the run
    where another limit is nearer. It depends on the progress alone, which is part of the train state: a resumed run
    continues its warm-up.
    """

    steps: int
    share: float | None

    def __call__(self, step: int, progress: float) -> float:
        """The factor of the learning rate in `step`; `progress` is that of the run before it."""
        by_steps = linear_warmup(step, warmup=self.steps)
        if self.share is None:
            return by_steps
        return max(by_steps, min(progress / self.share, linear_warmup(step, warmup=SHORTEST_WARMUP)))


def make_schedule(run: RunConfig, *, width: int | None) -> LearningRateFn:
    """The learning rate schedule of `run`; `width` is the model's, for a Noam schedule without one.

    A cosine spans its own number of steps if it has one, else the run; for a run that is not limited by steps alone, it
    follows the progress of the run.
    """
    config = run.schedule
    warmup = make_warmup(run)
    if isinstance(config, NoamSchedule):
        dim = config.width or width
        assert dim is not None, "load_run requires a width for a recipe without dim"
        return _noam(warmup, width=dim, scale=config.scale)
    peak = run.optim.lr
    assert peak is not None, "RunConfig sets lr for every schedule except noam"
    if isinstance(config, ConstantSchedule):
        return lambda step, progress: peak * warmup(step, progress)
    return _cosine(config, peak=peak, warmup=warmup, run_steps=_steps_if_only_limit(run))


def _noam(warmup: WarmUp, *, width: int, scale: float) -> LearningRateFn:
    """Noam's schedule; after a shortened warm-up, the rate stays at its peak until it falls as in the paper."""

    def learning_rate(step: int, progress: float) -> float:
        as_published = noam(step, width=width, warmup=warmup.steps, scale=scale)
        if step >= warmup.steps:
            return as_published
        # at the end of the warm-up, where the published rate is highest
        peak = noam(warmup.steps, width=width, warmup=warmup.steps, scale=scale)
        return max(as_published, peak * warmup(step, progress))

    return learning_rate


def noam(step: int, *, width: int, warmup: int, scale: float = 1.0) -> float:
    """scale * width^-0.5 * min(step^-0.5, step * warmup^-1.5) (Vaswani et al. 2017, section 5.3); `step` from 1."""
    assert min(step, warmup) >= 1
    return float(scale * width**-0.5 * min(step**-0.5, step * warmup**-1.5))


def _cosine(config: CosineSchedule, *, peak: float, warmup: WarmUp, run_steps: int | None) -> LearningRateFn:
    final_step = run_steps if config.steps is None else config.steps

    def learning_rate(step: int, progress: float) -> float:
        factor = warmup(step, progress)
        # a warm-up by share ends where its factor reaches 1, one by steps at its last step
        if factor < 1 or (step <= warmup.steps and final_step is not None):
            return peak * factor
        if final_step is not None:
            progress = (step - warmup.steps) / max(1, final_step - warmup.steps)
        return peak * cosine(progress, final_ratio=config.final_ratio)

    return learning_rate


def cosine(progress: float, *, final_ratio: float) -> float:
    """Half a cosine from 1 at progress 0 to `final_ratio` at 1 (Loshchilov and Hutter 2017), constant outside."""
    # a cosine with steps of its own may end before the run
    progress = min(1.0, max(0.0, progress))
    return final_ratio + (1 - final_ratio) * 0.5 * (1 + math.cos(math.pi * progress))


def make_warmup(run: RunConfig) -> WarmUp:
    """The warm-up of `run`; see WarmUp for runs with other limits than steps."""
    if run.limits.steps is not None:
        if _steps_if_only_limit(run):
            share = None
        else:
            # the share that the steps of the warm-up have: see `WarmUp`
            share = max(1, run.warmup) / run.limits.steps
        return WarmUp(run.warmup, share)
    return WarmUp(run.warmup, DEFAULT_WARMUP_SHARE if run.schedule.warmup is None else LARGEST_WARMUP_SHARE)


def linear_warmup(step: int, *, warmup: int) -> float:
    """Factor of a linear warm-up: step / warmup, 1 from step `warmup` on."""
    if warmup:
        return min(1.0, step / warmup)
    return 1.0


def _steps_if_only_limit(run: RunConfig) -> int | None:
    if all(limit is None for name, limit in run.limits if name != "steps"):
        return run.limits.steps
    return None
