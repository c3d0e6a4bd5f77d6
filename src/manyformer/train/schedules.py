"""Learning rate schedules as pure functions of the step; steps count from 1."""

import math
from collections.abc import Callable

from manyformer.config import ConstantSchedule, CosineSchedule, NoamSchedule, RunConfig

LearningRateFn = Callable[[int, float], float]
"""Maps the next step and the progress of the run before it (0 to 1) to the learning rate."""


def noam(step: int, *, width: int, warmup: int, scale: float = 1.0) -> float:
    """scale * width^-0.5 * min(step^-0.5, step * warmup^-1.5) (Vaswani et al. 2017, section 5.3); `step` from 1."""
    assert min(step, warmup) >= 1
    return float(scale * width**-0.5 * min(step**-0.5, step * warmup**-1.5))


def linear_warmup(step: int, *, warmup: int) -> float:
    """Factor of a linear warm-up: step / warmup, 1 from step `warmup` on."""
    return min(1.0, step / warmup) if warmup else 1.0


def cosine(progress: float, *, final_ratio: float) -> float:
    """Half a cosine from 1 at progress 0 to `final_ratio` at 1 (Loshchilov and Hutter 2017), constant outside."""
    progress = min(1.0, max(0.0, progress))
    return final_ratio + (1 - final_ratio) * 0.5 * (1 + math.cos(math.pi * progress))


def make_schedule(run: RunConfig, *, width: int | None) -> LearningRateFn:
    """The learning rate schedule of `run`; `width` is the model's, for a Noam schedule without one.

    A cosine spans its own number of steps if it has one, else the run; for a run that is not limited by steps alone, it
    follows the progress of the run.
    """
    config, warmup = run.schedule, run.warmup
    if isinstance(config, NoamSchedule):
        scale = config.scale
        dim = config.width or width
        assert dim is not None, "load_run requires a width for a recipe without dim"
        return lambda step, progress: noam(step, width=dim, warmup=warmup, scale=scale)
    peak = run.optim.lr
    assert peak is not None, "RunConfig sets lr for every schedule except noam"
    if isinstance(config, ConstantSchedule):
        return lambda step, progress: peak * linear_warmup(step, warmup=warmup)
    return _cosine(config, peak=peak, warmup=warmup, run_steps=_steps_if_only_limit(run))


def _steps_if_only_limit(run: RunConfig) -> int | None:
    return run.limits.steps if all(limit is None for name, limit in run.limits if name != "steps") else None


def _cosine(config: CosineSchedule, *, peak: float, warmup: int, run_steps: int | None) -> LearningRateFn:
    final_step = run_steps if config.steps is None else config.steps

    def learning_rate(step: int, progress: float) -> float:
        if step <= warmup:
            return peak * linear_warmup(step, warmup=warmup)
        if final_step is not None:
            progress = (step - warmup) / max(1, final_step - warmup)
        return peak * cosine(progress, final_ratio=config.final_ratio)

    return learning_rate
