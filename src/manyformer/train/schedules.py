"""Learning rate schedules as pure functions of the step; steps count from 1."""

import math
from collections.abc import Callable
from typing import NamedTuple

from manyformer.config import ConstantSchedule, CosineSchedule, NoamSchedule, RunConfig

LearningRateFn = Callable[[int, float], float]
"""Maps the next step and the progress of the run before it (0 to 1) to the learning rate."""

DEFAULT_WARMUP_SHARE = 0.1
LARGEST_WARMUP_SHARE = 0.5
"""The largest share of a run without limits.steps that is warm-up, by default and with schedule.warmup."""

SHORTEST_WARMUP = 10
"""Steps of the shortest warm-up: the first steps may take long, and say little about the speed of the others."""


def noam(step: int, *, width: int, warmup: int, scale: float = 1.0) -> float:
    """scale * width^-0.5 * min(step^-0.5, step * warmup^-1.5) (Vaswani et al. 2017, section 5.3); `step` from 1."""
    assert min(step, warmup) >= 1
    return float(scale * width**-0.5 * min(step**-0.5, step * warmup**-1.5))


def linear_warmup(step: int, *, warmup: int) -> float:
    """Factor of a linear warm-up: step / warmup, 1 from step `warmup` on."""
    if warmup:
        return min(1.0, step / warmup)
    return 1.0


def cosine(progress: float, *, final_ratio: float) -> float:
    """Half a cosine from 1 at progress 0 to `final_ratio` at 1 (Loshchilov and Hutter 2017), constant outside."""
    progress = min(1.0, max(0.0, progress))
    return final_ratio + (1 - final_ratio) * 0.5 * (1 + math.cos(math.pi * progress))


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


def make_warmup(run: RunConfig) -> WarmUp:
    """The warm-up of `run`; see WarmUp for runs with other limits than steps."""
    if run.limits.steps is not None:
        if _steps_if_only_limit(run):
            share = None
        else:
            share = max(1, run.warmup) / run.limits.steps
        return WarmUp(run.warmup, share)
    return WarmUp(run.warmup, DEFAULT_WARMUP_SHARE if run.schedule.warmup is None else LARGEST_WARMUP_SHARE)


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


def _steps_if_only_limit(run: RunConfig) -> int | None:
    if all(limit is None for name, limit in run.limits if name != "steps"):
        return run.limits.steps
    return None


def _noam(warmup: WarmUp, *, width: int, scale: float) -> LearningRateFn:
    """Noam's schedule; after a shortened warm-up, the rate stays at its peak until it falls as in the paper."""

    def learning_rate(step: int, progress: float) -> float:
        as_published = noam(step, width=width, warmup=warmup.steps, scale=scale)
        if step >= warmup.steps:
            return as_published
        peak = noam(warmup.steps, width=width, warmup=warmup.steps, scale=scale)
        return max(as_published, peak * warmup(step, progress))

    return learning_rate


def _cosine(config: CosineSchedule, *, peak: float, warmup: WarmUp, run_steps: int | None) -> LearningRateFn:
    final_step = run_steps if config.steps is None else config.steps

    def learning_rate(step: int, progress: float) -> float:
        factor = warmup(step, progress)
        if factor < 1 or (step <= warmup.steps and final_step is not None):
            return peak * factor
        if final_step is not None:
            progress = (step - warmup.steps) / max(1, final_step - warmup.steps)
        return peak * cosine(progress, final_ratio=config.final_ratio)

    return learning_rate
