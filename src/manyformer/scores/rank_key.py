"""The one rule by which scores are compared: a score that is no finite number is never the best."""

import math


def is_comparable(score: float | None) -> bool:
    """Whether a score can be compared with others: it is there, and neither NaN nor infinite."""
    return score is not None and math.isfinite(score)


def rank_key(score: float | None, *, lower_is_better: bool = True) -> float:
    """The number by which scores are sorted, best first: what cannot be compared comes last, whatever it is."""
    if score is None or not math.isfinite(score):
        return math.inf
    if lower_is_better:
        return score
    return -score
