"""How far apart two texts are, from 0 to 1."""

from collections import Counter
from collections.abc import Callable
from typing import Literal

TextDistance = Literal["rouge-l", "token-f1"]


def rouge_l(one: str, other: str) -> float:
    """1 - ROUGE-L (Lin 2004): of the longest words that both have in the same order, the F1 score."""
    a, b = one.split(), other.split()
    return _distance(_common(a, b), len(a), len(b))


def token_f1(one: str, other: str) -> float:
    """1 - F1 of the words that both have, in any order (Rajpurkar et al. 2016, without their normalisation)."""
    a, b = one.split(), other.split()
    return _distance((Counter(a) & Counter(b)).total(), len(a), len(b))


DISTANCES: dict[TextDistance, Callable[[str, str], float]] = {"rouge-l": rouge_l, "token-f1": token_f1}


def _distance(shared: int, one: int, other: int) -> float:
    """Two texts without words are alike."""
    return 1 - 2 * shared / (one + other) if one + other else 0.0


def _common(a: list[str], b: list[str]) -> int:
    """The length of the longest common subsequence."""
    row = [0] * (len(b) + 1)
    for word in a:
        before = 0
        for j, other in enumerate(b, 1):
            before, row[j] = row[j], before + 1 if word == other else max(row[j], row[j - 1])
    return row[-1]
