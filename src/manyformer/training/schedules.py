"""The learning rate schedule of a run, and its drawing.

A schedule is a function of the next step and of the progress of the run before it, both of which are in checkpoints: a
resumed run has the same learning rates. Steps count from 1."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, final

from manyformer.config import ConstantSchedule, CosineSchedule, NoamSchedule, RunConfig, WSDSchedule
from manyformer.training.train_state import RunAmounts, run_progress

LearningRateFn = Callable[[int, float], float]
"""Maps the next step and the progress of the run before it (0 to 1) to the learning rate."""

DEFAULT_WARMUP_SHARE = 0.1
LARGEST_WARMUP_SHARE = 0.5
"""The largest share of a run without limits.steps that is warm-up, by default and with schedule.warmup."""

SHORTEST_WARMUP = 10
"""Steps of the shortest warm-up: the first steps may take long, and say little about the speed of the others."""

DRAWN_POINTS = 60
"""The number of characters in the drawing of a schedule."""
LEVELS = "▁▂▃▄▅▆▇█"


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

    def describe(self, peak: float) -> str:
        """The warm-up to a peak in words."""
        if not self.steps:
            return f"{peak:.3g} from the first step on"
        share = ""
        if self.share is not None:
            share = f" or the first {self.share:.3g} of the run"
        return f"up to {peak:.3g} in {self.steps:,} steps{share}"


class Schedule(ABC):
    """A learning rate schedule: called with the next step and the progress before it, it returns the learning rate."""

    warmup: WarmUp
    run_steps: int | None
    """The last step of the run, None if it may end by another limit."""

    @abstractmethod
    def __call__(self, step: int, progress: float) -> float:
        """The learning rate of `step`; `progress` is that of the run before it."""

    @abstractmethod
    def describe(self) -> str:
        """The course of the rate in words."""

    def sample(self, points: int) -> list[float]:
        """The rate at evenly spaced places of the run; without a number of steps, where its speed is as expected."""
        steps = self.run_steps
        if steps is None:
            # the number at which the warm-up by steps and that by its share end together
            share = self.warmup.share or DEFAULT_WARMUP_SHARE
            steps = math.ceil(max(1, self.warmup.steps) / share)
        rates = []
        for point in range(points):
            done = point * steps // points
            rates.append(self(done + 1, done / steps))
        return rates


@final
@dataclass(frozen=True)
class ConstantRate(Schedule):
    """A constant rate after the warm-up."""

    warmup: WarmUp
    run_steps: int | None
    peak: float

    def __call__(self, step: int, progress: float) -> float:
        return self.peak * self.warmup(step, progress)

    def describe(self) -> str:
        return f"{self.warmup.describe(self.peak)}, then constant"


@final
@dataclass(frozen=True)
class NoamRate(Schedule):
    """Noam's schedule; after a shortened warm-up, the rate stays at its peak until it falls as in the paper."""

    warmup: WarmUp
    run_steps: int | None
    width: int
    scale: float

    @property
    def peak(self) -> float:
        """The published rate at the end of the warm-up, where it is highest."""
        return noam(self.warmup.steps, width=self.width, warmup=self.warmup.steps, scale=self.scale)

    def __call__(self, step: int, progress: float) -> float:
        as_published = noam(step, width=self.width, warmup=self.warmup.steps, scale=self.scale)
        if step >= self.warmup.steps:
            return as_published
        return max(as_published, self.peak * self.warmup(step, progress))

    def describe(self) -> str:
        return f"{self.warmup.describe(self.peak)}, then as the inverse root of the step"


@final
@dataclass(frozen=True)
class CosineRate(Schedule):
    """Half a cosine after the warm-up, to `last_step` if the schedule or the run has one, else with the progress."""

    warmup: WarmUp
    run_steps: int | None
    peak: float
    final_ratio: float
    last_step: int | None

    def __call__(self, step: int, progress: float) -> float:
        factor = self.warmup(step, progress)
        # a warm-up by share ends where its factor reaches 1, one by steps at its last step
        if factor < 1 or (step <= self.warmup.steps and self.last_step is not None):
            return self.peak * factor
        if self.last_step is not None:
            progress = (step - self.warmup.steps) / max(1, self.last_step - self.warmup.steps)
        return self.peak * cosine(progress, final_ratio=self.final_ratio)

    def describe(self) -> str:
        end = "the end of the run" if self.last_step is None else f"step {self.last_step:,}"
        return f"{self.warmup.describe(self.peak)}, then half a cosine to {self.final_ratio * self.peak:.3g} at {end}"


@final
@dataclass(frozen=True)
class WSDRate(Schedule):
    """Warm-up, stable, decay: the peak until `decay_start`, then down to `final_ratio` of it at the end of the run.

    `decay_start` is a step if the run ends at one, else a share of the progress. The rate of a step depends on what is
    done before it, so that the first step of the decay has the peak and the last one, above a `final_ratio` of 0, still
    changes the weights."""

    warmup: WarmUp
    run_steps: int | None
    peak: float
    shape: str
    final_ratio: float
    decay_start: float

    DECAYS: ClassVar[dict[str, Callable[[float, float], float]]] = {
        "linear": lambda done, final: final + (1 - final) * (1 - done),
        "1-sqrt": lambda done, final: final + (1 - final) * (1 - math.sqrt(done)),
        "exponential": lambda done, final: final**done,
    }
    """The factor of each shape where a share of the decay is done."""

    def __call__(self, step: int, progress: float) -> float:
        place, end = progress, 1.0
        if self.run_steps is not None:
            place, end = step - 1, self.run_steps
        # the same two numbers in a run that only decays as in one that was trained through: equal to the last bit
        done = min(1.0, max(0.0, place - self.decay_start) / (end - self.decay_start))
        return self.peak * self.warmup(step, progress) * self.DECAYS[self.shape](done, self.final_ratio)

    def describe(self) -> str:
        start = f"after {self.decay_start:.3g} of the run"
        end = "its end"
        if self.run_steps is not None:
            start = f"after step {self.decay_start:,}"
            end = f"step {self.run_steps:,}"
        decay = f"{self.shape} decay to {self.final_ratio * self.peak:.3g} at {end}"
        return f"{self.warmup.describe(self.peak)}, then constant, {start} {decay}"


def make_schedule(run: RunConfig, *, width: int | None, branch: RunAmounts | None = None) -> Schedule:
    """The learning rate schedule of `run`; `width` is the model's, for a Noam schedule without one.

    A cosine spans its own number of steps if it has one, else the run; for a run that is not limited by steps alone, it
    follows the progress of the run. `branch` is where the run went on from another one, from which it may decay.
    """
    config = run.schedule
    warmup = make_warmup(run)
    run_steps = _steps_if_only_limit(run)
    if isinstance(config, NoamSchedule):
        dim = config.width or width
        assert dim is not None, "load_run requires a width for a recipe without dim"
        return NoamRate(warmup, run_steps, dim, config.scale)
    peak = run.optim.lr
    assert peak is not None, "RunConfig sets lr for every schedule except noam"
    if isinstance(config, ConstantSchedule):
        return ConstantRate(warmup, run_steps, peak)
    if isinstance(config, WSDSchedule):
        return WSDRate(warmup, run_steps, peak, config.shape, config.final_ratio, _decay_start(run, config, branch))
    assert isinstance(config, CosineSchedule)
    last_step = run_steps if config.steps is None else config.steps
    return CosineRate(warmup, run_steps, peak, config.final_ratio, last_step)


def _decay_start(run: RunConfig, config: WSDSchedule, branch: RunAmounts | None) -> float:
    """The step, or the progress of a run that may end by another limit, after which the rate decays."""
    run_steps = _steps_if_only_limit(run)
    if config.decay_from == "now":
        # a run that has not begun yet is drawn as if it began with its decay
        begin = branch or RunAmounts()
        return begin.step if run_steps is not None else run_progress(run, begin)
    if run_steps is None:
        return 1 - config.decay_share
    decay_steps = max(1, round(config.decay_share * run_steps))
    # all that follows the warm-up at most
    return min(run_steps - 1, max(run.warmup, run_steps - decay_steps))


def noam(step: int, *, width: int, warmup: int, scale: float = 1.0) -> float:
    """scale * width^-0.5 * min(step^-0.5, step * warmup^-1.5) (Vaswani et al. 2017, section 5.3); `step` from 1."""
    assert min(step, warmup) >= 1
    return float(scale * width**-0.5 * min(step**-0.5, step * warmup**-1.5))


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


def draw_rates(rates: list[float]) -> str:
    """Rates as a row of bars, the highest of which is a full block; an empty place is a rate of 0."""
    highest = max(rates)
    if not highest:
        return " " * len(rates)
    bars = [
        LEVELS[min(len(LEVELS) - 1, math.ceil(rate / highest * len(LEVELS)) - 1)] if rate else " " for rate in rates
    ]
    return "".join(bars)
