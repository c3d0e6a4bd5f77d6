"""Classification scores: accuracy and F1, averaged over classes (macro) or over decisions (micro)."""

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Literal

from manyformer.errors import UserError
from manyformer.scores.record import ScoreRecord, check_pairs

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
