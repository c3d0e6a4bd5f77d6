"""Learning rates as pure functions of the step; steps count from 1."""

import math
from collections.abc import Callable

from manyformer.config import ConstantSchedule, CosineSchedule, NoamSchedule, RunConfig

LearningRateFn = Callable[[int, float], float]
"""From the step that is about to be made and the share of the run that lies behind it (0 to 1) to the learning rate."""


def noam(step: int, *, width: int, warmup: int, scale: float = 1.0) -> float:
    """scale * width^-0.5 * min(step^-0.5, step * warmup^-1.5) (Vaswani et al. 2017, section 5.3); `step` from 1."""
    assert min(step, warmup) >= 1
    return float(scale * width**-0.5 * min(step**-0.5, step * warmup**-1.5))


def rise(step: int, *, warmup: int) -> float:
    """The factor of a linear warm-up: step / warmup, 1 from step `warmup` on."""
    return min(1.0, step / warmup) if warmup else 1.0


def cosine(share: float, *, final: float) -> float:
    """Half a cosine from 1 at share 0 down to `final` at share 1 (Loshchilov and Hutter 2017), flat outside."""
    share = min(1.0, max(0.0, share))
    return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * share))


def schedule(run: RunConfig, *, width: int | None) -> LearningRateFn:
    """The learning rate of `run`; `width` is the model's, for a Noam schedule that names none.

    A cosine falls over the steps that it is given, else over the run; where the run's end is not a number of steps, the
    share of the run that lies behind decides.
    """
    wanted, warmup = run.schedule, run.warmup
    if isinstance(wanted, NoamSchedule):
        scale = wanted.scale
        wide = wanted.width or width
        assert wide is not None, "load_run asks for a width where the recipe has no dim"
        return lambda step, share: noam(step, width=wide, warmup=warmup, scale=scale)
    peak = run.optim.lr
    assert peak is not None, "the record fills the rate in for every schedule but noam"
    if isinstance(wanted, ConstantSchedule):
        return lambda step, share: peak * rise(step, warmup=warmup)
    return _cosine(wanted, peak=peak, warmup=warmup, only_steps=_only_steps(run))


def _only_steps(run: RunConfig) -> int | None:
    limits = run.limits
    others = (limits.epochs, limits.tokens, limits.minutes, limits.processor)
    return limits.steps if all(limit is None for limit in others) else None


def _cosine(wanted: CosineSchedule, *, peak: float, warmup: int, only_steps: int | None) -> LearningRateFn:
    end = only_steps if wanted.steps is None else wanted.steps

    def rate(step: int, share: float) -> float:
        if step <= warmup:
            return peak * rise(step, warmup=warmup)
        if end is not None:
            share = (step - warmup) / max(1, end - warmup)
        return peak * cosine(share, final=wanted.final)

    return rate
