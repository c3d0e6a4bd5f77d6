"""Distances between two texts, from 0 to 1."""

from collections import Counter
from collections.abc import Callable
from typing import Literal

TextDistance = Literal["rouge-l", "token-f1"]


def rouge_l_distance(text: str, reference: str) -> float:
    """1 - ROUGE-L (Lin 2004), where ROUGE-L is the F1 score of the longest common subsequence of words."""
    a = text.split()
    b = reference.split()
    return _f1_distance(_lcs_length(a, b), len(a), len(b))


def token_f1_distance(text: str, reference: str) -> float:
    """1 - F1 of the words that the texts share in any order (Rajpurkar et al. 2016, without their normalization)."""
    a = text.split()
    b = reference.split()
    return _f1_distance((Counter(a) & Counter(b)).total(), len(a), len(b))


DISTANCES: dict[TextDistance, Callable[[str, str], float]] = {
    "rouge-l": rouge_l_distance,
    "token-f1": token_f1_distance,
}


def _f1_distance(common: int, length_a: int, length_b: int) -> float:
    """1 - F1 of `common` items out of two lists of these lengths; 0 for two empty lists."""
    if length_a + length_b:
        return 1 - 2 * common / (length_a + length_b)
    return 0.0


def _lcs_length(a: list[str], b: list[str]) -> int:
    """The length of the longest common subsequence of `a` and `b`."""
    lengths = [0] * (len(b) + 1)
    for word_a in a:
        diagonal = 0
        for j, word_b in enumerate(b, 1):
            diagonal, lengths[j] = lengths[j], diagonal + 1 if word_a == word_b else max(lengths[j], lengths[j - 1])
    return lengths[-1]
