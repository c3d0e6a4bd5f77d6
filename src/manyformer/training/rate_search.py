"""The learning-rate range test of `manyformer train --find-lr` (Smith 2017, arXiv:1506.01186).

A few steps of the run at a rate that grows exponentially, from far too low to far too high: the loss says where the
run learns. Nothing is written to the folder of the run."""

import math
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from itertools import islice
from typing import NamedTuple

from manyformer.base.errors import UserError
from manyformer.base.system import temporary_folder
from manyformer.config import RunConfig
from manyformer.config.training_sections import DEFAULT_LR
from manyformer.training.build_model import (
    adapt_model,
    build_model,
    choose_device,
    choose_strategy,
    make_engine,
    open_run_data,
)
from manyformer.training.init_from import check_random_init, load_initial_weights
from manyformer.training.process_group import SINGLE_PROCESS_GROUP
from manyformer.training.process_state import deterministic_algorithms, seed_everything
from manyformer.training.run_checks import check_before_data

RATE_STEPS = 120
"""The steps of a test."""

MAX_SECONDS = 300.0
"""A test of a slow run ends after so many seconds, with the rates that it has reached."""

LOWEST_RATIO = 1e-4
HIGHEST_RATIO = 1e3
"""The rates of a test, as multiples of the default of the optimizer."""

SMOOTHED_STEPS = 3
"""The losses of so many steps before and after a step are averaged with its own."""

DIVERGED_RATIO = 1.3
"""A test ends where the smoothed loss exceeds the first one so many times."""


class RateTest(NamedTuple):
    """The rates of a test with their losses, plain and smoothed; the suggested rate, if any, and the reason."""

    rates: list[float]
    losses: list[float]
    smoothed: list[float]
    suggested: float | None
    reason: str
    seconds: float


def find_learning_rate(run: RunConfig) -> RateTest:
    """Take steps of the run at growing rates. Raises UserError for a run whose rate cannot be found in this way."""
    if run.schedule.name == "noam":
        raise UserError("--find-lr changes optim.lr, but noam sets the rate itself; set schedule.name=cosine")
    if run.devices > 1:
        raise UserError(f"--find-lr takes its steps in one process, but devices is {run.devices}; add devices=1")
    if run.branch_from is not None:
        raise UserError("--find-lr begins with the first weights, but branch_from goes on from others; leave it out")
    begin = time.perf_counter()
    losses = list[float]()
    steps = _losses(run, _growing_rates(run))
    with deterministic_algorithms(on=run.deterministic), closing(steps):
        for loss in steps:
            losses.append(loss)
            if _has_diverged(losses) or time.perf_counter() - begin > MAX_SECONDS:
                break
    finite = list(_finite_start(losses))
    rates = _growing_rates(run)[: len(finite)]
    smoothed = smooth(finite)
    suggested, reason = suggest_rate(rates, smoothed)
    return RateTest(rates, finite, smoothed, suggested, reason, time.perf_counter() - begin)


def _growing_rates(run: RunConfig) -> list[float]:
    """The rate of each step, which grows by the same factor from step to step."""
    usual = DEFAULT_LR[run.optim.name]
    growth = (HIGHEST_RATIO / LOWEST_RATIO) ** (1 / (RATE_STEPS - 1))
    return [usual * LOWEST_RATIO * growth**step for step in range(RATE_STEPS)]


def _losses(run: RunConfig, rates: Sequence[float]) -> Generator[float]:
    """The loss of a step at each of the rates, before the weights are changed by it."""
    device = choose_device(run.device, SINGLE_PROCESS_GROUP)
    check_before_data(run, device)
    with temporary_folder() as folder:
        data = open_run_data(run, folder, lambda text: None)
        seed_everything(run.seed)
        model = build_model(run, data, device)
        if run.init_from is None:
            check_random_init(model)
        else:
            load_initial_weights(model, run.init_from, data)
        adapt_model(model, run)
        engine = make_engine(run, model, data.train, device, choose_strategy(run.strategy, SINGLE_PROCESS_GROUP))
        try:
            for rate in rates:
                batches = list(islice(data.train, run.batch.accumulate))
                yield float(engine.step(batches, rate).figures[0])
        finally:
            data.train.close()


def _finite_start(losses: Sequence[float]) -> Iterator[float]:
    """The losses until the first that is no finite number."""
    for loss in losses:
        if not math.isfinite(loss):
            return
        yield loss


def _has_diverged(losses: Sequence[float]) -> bool:
    if not math.isfinite(losses[-1]):
        return True
    smoothed = smooth(losses)
    return smoothed[-1] > DIVERGED_RATIO * smoothed[0]


def smooth(losses: Sequence[float]) -> list[float]:
    """The mean of each loss with its neighbors on both sides: a mean of earlier ones alone would lag behind."""
    means = list[float]()
    for step in range(len(losses)):
        window = losses[max(0, step - SMOOTHED_STEPS) : step + SMOOTHED_STEPS + 1]
        means.append(sum(window) / len(window))
    return means


def suggest_rate(rates: Sequence[float], smoothed: Sequence[float]) -> tuple[float | None, str]:
    """The rate at which the loss falls fastest, None if it never falls, and the reason in words."""
    lowest = min(range(len(smoothed)), key=smoothed.__getitem__, default=0)
    if lowest == 0:
        return (
            None,
            "the loss never falls below that of the first step: the data or the model need a look, not the rate",
        )

    def slope(step: int) -> float:
        # over as many steps as the mean, so that no single one decides; what rises again is left out
        return smoothed[min(lowest, step + SMOOTHED_STEPS)] - smoothed[max(0, step - SMOOTHED_STEPS)]

    steepest = min(range(lowest), key=slope)
    suggested = float(f"{rates[steepest]:.1g}")
    end = "rises after that"
    if lowest == len(rates) - 1:
        end = "may fall further: it is the last rate that was tried"
    return suggested, (
        f"the loss falls fastest near {rates[steepest]:.2g}; it is lowest at {rates[lowest]:.2g} "
        f"({smoothed[lowest]:.3f}) and {end}. A rate between the two may be too high for the later steps of a run"
    )
