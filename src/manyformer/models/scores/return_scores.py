"""Scores of episodes: mean return and length, and the share of successes, with 95 % confidence intervals."""

import math

import numpy as np
from numpy.typing import NDArray

from manyformer.base.errors import UserError
from manyformer.models.scores.record import ScoreRecord

RESAMPLES = 10_000
BOOTSTRAP_SEED = 12345
NORMAL_QUANTILE = 1.959964
"""The 97.5 % quantile of the normal distribution."""


def mean_return(returns: NDArray[np.floating]) -> ScoreRecord:
    """The mean return, with the percentile interval of the bootstrap over episodes (Efron 1979).

    Raises UserError without episodes."""
    check_episodes(returns)
    generator = np.random.default_rng(BOOTSTRAP_SEED)
    count = len(returns)
    # in chunks, so that many episodes do not fill the memory
    chunk = max(1, min(RESAMPLES, (1 << 22) // count))
    means = np.concatenate(
        [returns[generator.integers(count, size=(chunk, count))].mean(axis=1) for _ in range(-(-RESAMPLES // chunk))]
    )
    low, high = np.quantile(means, [0.025, 0.975])
    return _interval_score("return", float(returns.mean()), float(low), float(high), f"bootstrap|episodes:{count}", 3)


def success_rate(successes: NDArray[np.bool_]) -> ScoreRecord:
    """The percentage of successes, with the interval of Wilson (1927), which is not empty where all or none succeed.

    Raises UserError without episodes."""
    check_episodes(successes)
    count = len(successes)
    share = float(successes.mean())
    z = NORMAL_QUANTILE
    center = (share + z**2 / (2 * count)) / (1 + z**2 / count)
    half = z / (1 + z**2 / count) * math.sqrt(share * (1 - share) / count + z**2 / (4 * count**2))
    low = max(0.0, center - half)
    high = min(1.0, center + half)
    return _interval_score("success", 100 * share, 100 * low, 100 * high, f"Wilson|episodes:{count}", 1)


def mean_length(lengths: NDArray[np.integer]) -> ScoreRecord:
    """The mean number of steps of an episode. Raises UserError without episodes."""
    check_episodes(lengths)
    return ScoreRecord("episode length", float(lengths.mean()), f"episodes:{len(lengths)}", digits=1)


def check_episodes(values: NDArray[np.generic]) -> None:
    """Raise UserError if there are no episodes."""
    if not len(values):
        raise UserError("there are no episodes to score")


def _interval_score(name: str, value: float, low: float, high: float, method: str, digits: int) -> ScoreRecord:
    signature = f"95% interval {low:.{digits}f} to {high:.{digits}f}|{method}"
    return ScoreRecord(name, value, signature, digits=digits, parts={"low": low, "high": high})
