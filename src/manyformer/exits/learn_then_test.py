"""Learn then test: certify which of a descending sequence of thresholds keep a risk below a tolerance."""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from manyformer.errors import UserError
from manyformer.type_aliases import FloatArray


def hoeffding_p_value(risk: float, count: int, tolerance: float) -> float:
    """The p-value of a mean `risk` of `count` losses in [0, 1] if the expected loss exceeds `tolerance`.

    Hoeffding's (1963) inequality in its tight form, exp(-n h(risk, tolerance)) with h the relative entropy of Bernoulli
    distributions.
    """
    low = min(risk, tolerance)
    return math.exp(-count * _relative_entropy(low, tolerance))


def bentkus_p_value(risk: float, count: int, tolerance: float) -> float:
    """The same p-value by Bentkus (2004): e times the probability of at most ceil(n risk) in Binomial(n, tolerance)."""
    return math.e * binomial_cdf(math.ceil(count * risk), count, tolerance)


def hoeffding_bentkus_p_value(risk: float, count: int, tolerance: float) -> float:
    """The smaller of the two p-values (Bates et al. 2021, arXiv:2101.02703, proposition 6), at most 1."""
    return min(1.0, hoeffding_p_value(risk, count, tolerance), bentkus_p_value(risk, count, tolerance))


def binomial_cdf(successes: int, trials: int, probability: float) -> float:
    """The probability of at most `successes` in `trials` trials of success `probability`, strictly between 0 and 1.

    Computed from the ratios of neighboring probabilities to the largest one, so that nothing overflows and no digits
    are lost.
    """
    if successes >= trials:
        return 1.0
    mode = min(trials, math.floor((trials + 1) * probability))
    odds = probability / (1 - probability)
    counts_above = np.arange(mode, trials)
    counts_below = np.arange(mode, 0, -1)
    ratios_above = np.cumprod((trials - counts_above) / (counts_above + 1) * odds)
    ratios_below = np.cumprod(counts_below / (trials - counts_below + 1) / odds)
    weights: FloatArray = np.concatenate([ratios_below[::-1], [1.0], ratios_above])
    # the smallest weights first
    return math.fsum(weights[: successes + 1]) / math.fsum(weights)


def _relative_entropy(p: float, q: float) -> float:
    """The relative entropy of Bernoulli(p) with respect to Bernoulli(q)."""
    success_term = p * math.log(p / q) if p > 0 else 0.0
    return success_term + ((1 - p) * math.log((1 - p) / (1 - q)) if p < 1 else 0.0)


class ThresholdTest(NamedTuple):
    """The test of one threshold: its mean loss, the p-value of that, and whether the threshold is certified."""

    threshold: float
    risk: float
    p_value: float
    certified: bool


def fixed_sequence_test(
    losses: Iterable[tuple[float, Sequence[float]]], *, tolerance: float, confidence: float
) -> Iterator[ThresholdTest]:
    """Test thresholds in descending order, each with independent losses, up to the first that is not certified.

    Fixed-sequence testing of the hypothesis "the expected loss exceeds `tolerance`" (Angelopoulos et al. 2021,
    arXiv:2110.01052; Schuster et al. 2022, section 4): with probability `confidence` at least, the expected loss under
    every certified threshold is at most `tolerance`. Thresholds must be fixed in advance; losses after the first
    failure are not requested. Raises UserError for a tolerance or a confidence that is not between 0 and 1, for
    thresholds that do not descend, and without losses.
    """
    check_levels(tolerance, confidence)
    previous = math.inf
    for threshold, independent_losses in losses:
        if not len(independent_losses):
            raise UserError("a threshold cannot be tested without prompts")
        if not all(0 <= loss <= 1 for loss in independent_losses):
            raise UserError(f"the losses at threshold {threshold:g} must be numbers from 0 to 1")
        if threshold >= previous:
            raise UserError(f"thresholds must be in descending order, but {threshold:g} follows {previous:g}")
        risk = math.fsum(independent_losses) / len(independent_losses)
        p_value = hoeffding_bentkus_p_value(risk, len(independent_losses), tolerance)
        test = ThresholdTest(threshold, risk, p_value, p_value <= 1 - confidence)
        yield test
        if not test.certified:
            return
        previous = threshold


def check_levels(tolerance: float, confidence: float) -> None:
    """Raise UserError for a level that is not between 0 and 1."""
    for name, value in (("tolerance", tolerance), ("confidence", confidence)):
        if not 0 < value < 1:
            raise UserError(f"{name} ({value}) must lie between 0 and 1")


def required_count(tolerance: float, confidence: float, risk: float = 0.0) -> int:
    """How many independent losses with the mean `risk`, below `tolerance`, certify a threshold by Hoeffding's bound.

    For no risk at all no smaller number does.
    """
    return math.ceil(math.log(1 - confidence) / -_relative_entropy(risk, tolerance))
