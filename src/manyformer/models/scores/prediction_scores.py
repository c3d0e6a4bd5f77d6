"""Scores of predictions: accuracy and F1 of labels, and what follows from a summed negative log-likelihood in nats."""

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Literal

from manyformer.base.errors import UserError
from manyformer.models.scores.record import ScoreRecord, check_pairs

F1Average = Literal["macro", "micro"]


def accuracy(predictions: Sequence[Hashable], references: Sequence[Hashable]) -> ScoreRecord:
    """The percentage of correct predictions. Raises UserError for unequal lengths and empty input."""
    check_pairs(predictions, references, "predictions")
    correct = sum(a == b for a, b in zip(predictions, references))
    return ScoreRecord("accuracy", 100 * correct / len(predictions), f"items:{len(predictions)}")


def f1(
    predictions: Sequence[Hashable],
    references: Sequence[Hashable],
    *,
    average: F1Average = "macro",
    classes: Sequence[Hashable] | None = None,
) -> ScoreRecord:
    """The harmonic mean of precision and recall, 0 to 100; `parts` has that of each class.

    "macro" is the mean over classes, with 0 for a class that is neither predicted nor in the references; "micro"
    counts decisions over all classes, which is the accuracy unless `classes` excludes some (such as the "other" class
    of a tagger). `classes` are by default those that occur. Raises UserError for unequal lengths and empty input.
    """
    check_pairs(predictions, references, "predictions")
    if average not in ("macro", "micro"):
        raise UserError(f"average must be 'macro' or 'micro', got '{average}'")
    # a class that is neither predicted nor present would lower a mean over classes
    if classes is None:
        names = sorted({*predictions, *references}, key=str)
    else:
        names = list(classes)
    if not names:
        raise UserError("there are no classes to score")
    correct = Counter(a for a, b in zip(predictions, references) if a == b)
    predicted = Counter(predictions)
    actual = Counter(references)
    parts = {str(name): _f1(correct[name], predicted[name], actual[name]) for name in names}
    if average == "macro":
        value = sum(parts.values()) / len(parts)
    else:
        value = _f1(*(sum(count[name] for name in names) for count in (correct, predicted, actual)))
    return ScoreRecord(
        f"{average} F1", value, f"average:{average}|classes:{len(names)}|items:{len(predictions)}", parts=parts
    )


def _f1(correct: int, predicted: int, actual: int) -> float:
    if predicted + actual:
        return 100 * 2 * correct / (predicted + actual)
    return 0.0


def perplexity(nats: float, count: int) -> ScoreRecord:
    """exp of the mean negative log-likelihood per token; `nats` must not include label smoothing."""
    mean = _mean(nats, count, "token")
    # exp would overflow: the perplexity is infinite, not an error
    value = math.exp(mean) if mean < 700 else math.inf
    return ScoreRecord("perplexity", value, f"per:token|tokens:{count}", parts={"nats": mean})


def bits_per_character(nats: float, characters: int) -> ScoreRecord:
    """Bits per character (Unicode code point) of the text, independent of the tokenizer."""
    mean = _mean(nats, characters, "character")
    return ScoreRecord("bits per character", mean / math.log(2), f"per:character|characters:{characters}", 4)


def bits_per_byte(nats: float, size: int) -> ScoreRecord:
    """Bits per UTF-8 byte of the text, independent of the tokenizer."""
    return ScoreRecord("bits per byte", _mean(nats, size, "byte") / math.log(2), f"per:byte|bytes:{size}", 4)


def bits_per_dimension(nats: float, values: int) -> ScoreRecord:
    """Bits per value (pixels times channels) of images."""
    return ScoreRecord(
        "bits per dimension", _mean(nats, values, "value") / math.log(2), f"per:value|values:{values}", 4
    )


def token_accuracy(correct: int, count: int) -> ScoreRecord:
    """The percentage of tokens that are the most likely ones given the true previous tokens."""
    if not 0 <= correct <= count:
        raise UserError(f"correct must be from 0 to the {count} tokens, got {correct}")
    return ScoreRecord("token accuracy", 100 * _mean(correct, count, "token"), f"per:token|tokens:{count}")


def row_exact_match(correct: int, rows: int) -> ScoreRecord:
    """The percentage of rows all of whose targets are the most likely ones given the true previous tokens."""
    if not 0 <= correct <= rows:
        raise UserError(f"correct must be from 0 to the {rows} rows, got {correct}")
    return ScoreRecord("exact match", 100 * _mean(correct, rows, "row"), f"per:row|rows:{rows}")


def _mean(total: float, count: int, unit: str) -> float:
    if count < 1:
        raise UserError(f"there is no {unit} to score: the count is {count}")
    return total / count
