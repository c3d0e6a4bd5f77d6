"""Scores of answers to questions: exact match and F1 over words, as SQuAD's (Rajpurkar et al. 2016, section 6.1)."""

import re
import string
from collections import Counter
from collections.abc import Sequence

from manyformer.scores.record import ScoreRecord, check_pairs

_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalized_answer(text: str) -> str:
    """A text in lower case without punctuation, articles and repeated white space."""
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(_PUNCTUATION)).split())


def answer_exact_match(answers: Sequence[str], references: Sequence[str]) -> ScoreRecord:
    """The percentage of answers that equal their reference when both are normalized; "" is no answer."""
    check_pairs(answers, references, "answers")
    correct = sum(normalized_answer(answer) == normalized_answer(other) for answer, other in zip(answers, references))
    return ScoreRecord("exact match", 100 * correct / len(answers), f"items:{len(answers)}")


def answer_f1(answers: Sequence[str], references: Sequence[str]) -> ScoreRecord:
    """The mean F1 of the words of an answer and of its reference, 0 to 100; where either is empty, whether both are."""
    check_pairs(answers, references, "answers")
    total = sum(
        _word_f1(normalized_answer(a).split(), normalized_answer(b).split()) for a, b in zip(answers, references)
    )
    return ScoreRecord("answer F1", 100 * total / len(answers), f"items:{len(answers)}")


def _word_f1(answer: list[str], reference: list[str]) -> float:
    if not answer or not reference:
        return float(answer == reference)
    common = sum((Counter(answer) & Counter(reference)).values())
    return 2 * common / (len(answer) + len(reference))
