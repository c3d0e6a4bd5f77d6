"""Learn then test: which of a descending row of thresholds keep a risk below a tolerance, with a stated confidence."""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from manyformer.errors import UserError

FloatArray = NDArray[np.float64]


def hoeffding(risk: float, count: int, tolerance: float) -> float:
    """The p-value of a mean `risk` of `count` losses in [0, 1] where the true one exceeds `tolerance`.

    Hoeffding's (1963) inequality in its tight form, exp(-n h(risk, tolerance)) with the relative entropy h of coins.
    """
    low = min(risk, tolerance)
    return math.exp(-count * _entropy(low, tolerance))


def bentkus(risk: float, count: int, tolerance: float) -> float:
    """The same by Bentkus (2004): e times the chance of at most ceil(n risk) among n coins that fall at `tolerance`."""
    return math.e * binomial_cdf(math.ceil(count * risk), count, tolerance)


def hoeffding_bentkus(risk: float, count: int, tolerance: float) -> float:
    """The smaller of both (Bates et al. 2021, arXiv:2101.02703, proposition 6), at most 1."""
    return min(1.0, hoeffding(risk, count, tolerance), bentkus(risk, count, tolerance))


def binomial_cdf(most: int, count: int, share: float) -> float:
    """The chance of at most `most` among `count` coins each of which falls with chance `share`, between 0 and 1.

    By the ratios of neighbouring chances to the largest one, so that nothing overflows and no digits are lost.
    """
    if most >= count:
        return 1.0
    mode = min(count, math.floor((count + 1) * share))
    odds = share / (1 - share)
    above = np.arange(mode, count)
    below = np.arange(mode, 0, -1)
    up = np.cumprod((count - above) / (above + 1) * odds)
    down = np.cumprod(below / (count - below + 1) / odds)
    weights: FloatArray = np.concatenate([down[::-1], [1.0], up])
    # the smallest first
    return math.fsum(weights[: most + 1]) / math.fsum(weights)


def _entropy(a: float, b: float) -> float:
    """Of a coin that falls with chance a, relative to one with chance b."""
    first = a * math.log(a / b) if a > 0 else 0.0
    return first + ((1 - a) * math.log((1 - a) / (1 - b)) if a < 1 else 0.0)


class ThresholdTest(NamedTuple):
    """One threshold: the mean loss that was found with it, its p-value, and whether it is certified."""

    threshold: float
    risk: float
    p_value: float
    certified: bool


def fixed_sequence(
    losses: Iterable[tuple[float, Sequence[float]]], *, tolerance: float, confidence: float
) -> Iterator[ThresholdTest]:
    """Go down the thresholds, each with the losses of all prompts, as long as each is certified; the last may not be.

    Fixed-sequence testing of "the expected loss exceeds `tolerance`" (Angelopoulos et al. 2021, arXiv:2110.01052;
    Schuster et al. 2022, section 4): with chance `confidence` at least, the loss expected under every certified
    threshold is at most `tolerance`. Thresholds must be fixed beforehand; what comes after the first failure is not
    asked for. Raises UserError for a tolerance or a confidence that is not between 0 and 1, and without losses.
    """
    check_levels(tolerance, confidence)
    before = math.inf
    for threshold, each in losses:
        if not len(each):
            raise UserError("nothing can be tested without a prompt")
        if threshold >= before:
            raise UserError(f"thresholds must fall, and {threshold:g} comes after {before:g}")
        risk = math.fsum(each) / len(each)
        p_value = hoeffding_bentkus(risk, len(each), tolerance)
        one = ThresholdTest(threshold, risk, p_value, p_value <= 1 - confidence)
        yield one
        if not one.certified:
            return
        before = threshold


def check_levels(tolerance: float, confidence: float) -> None:
    """Raise a UserError for one that is not between 0 and 1."""
    for name, value in (("tolerance", tolerance), ("confidence", confidence)):
        if not 0 < value < 1:
            raise UserError(f"{name} ({value}) must lie between 0 and 1")


def prompts_needed(tolerance: float, confidence: float) -> int:
    """How many prompts can certify anything at all, were there no loss in any of them."""
    return math.ceil(math.log(1 - confidence) / math.log(1 - tolerance))
