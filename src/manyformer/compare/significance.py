"""Whether cases differ over seeds: paired t-tests, adjusted for the number of comparisons."""

import math
import statistics
import sys
from collections.abc import Mapping, Sequence

SIGNIFICANCE_LEVEL = 0.05


def paired_t_test(first: Sequence[float], second: Sequence[float]) -> float | None:
    """The two-sided p-value of Student's t-test on the paired differences; None where the test has no value.

    It has none for fewer than two pairs, for numbers that are not finite, and where all differences are equal but 0:
    their spread says nothing about chance then. Where all pairs are equal the value is 1."""
    if not all(map(math.isfinite, [*first, *second])):
        return None
    differences = [a - b for a, b in zip(first, second, strict=True)]
    if len(differences) < 2:
        return None
    mean = statistics.fmean(differences)
    deviation = statistics.stdev(differences)
    # differences of decimals such as 0.3 - 0.1 are equal but for the rounding of their last digit
    rounding = 4 * sys.float_info.epsilon * max(map(abs, [*first, *second]))
    if deviation <= rounding:
        if abs(mean) <= rounding:
            return 1.0
        return None
    return student_t_tails(mean / (deviation / math.sqrt(len(differences))), len(differences) - 1)


def student_t_tails(t: float, degrees: int) -> float:
    """The probability of a value at least as far from 0 as `t` (Abramowitz and Stegun 1964, 26.7.3 and 26.7.4)."""
    if degrees < 1:
        raise ValueError(f"student_t_tails: degrees ({degrees}) must be at least 1")
    angle = math.atan(abs(t) / math.sqrt(degrees))
    sine = math.sin(angle)
    cosine = math.cos(angle)
    is_odd = degrees % 2
    term = cosine if is_odd else 1.0
    total = 0.0
    for k in range(1 + is_odd, degrees, 2):
        total += term
        term *= k / (k + 1) * cosine**2
    if is_odd:
        inside = 2 / math.pi * (angle + sine * total)
    else:
        inside = sine * total
    return max(0.0, 1.0 - inside)


def holm_adjusted(p_values: Mapping[str, float]) -> dict[str, float]:
    """The p-values of several tests, adjusted so that one level holds for all together (Holm 1979)."""
    adjusted: dict[str, float] = {}
    largest = 0.0
    for rank, name in enumerate(sorted(p_values, key=lambda name: p_values[name])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[name]))
        adjusted[name] = largest
    return adjusted
