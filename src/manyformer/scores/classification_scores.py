"""Scores of classifications: accuracy, and F1 averaged over classes or over decisions."""

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Literal

from manyformer.errors import UserError
from manyformer.scores.record import ScoreRecord, check_pairs

F1Average = Literal["macro", "micro"]


def accuracy(found: Sequence[Hashable], wanted: Sequence[Hashable]) -> ScoreRecord:
    """How many of 100 are right. Raises UserError for unequal lengths and for nothing at all."""
    check_pairs(found, wanted, "predictions")
    right = sum(a == b for a, b in zip(found, wanted))
    return ScoreRecord("accuracy", 100 * right / len(found), f"items:{len(found)}")


def f1(
    found: Sequence[Hashable],
    wanted: Sequence[Hashable],
    *,
    average: F1Average = "macro",
    classes: Sequence[Hashable] | None = None,
) -> ScoreRecord:
    """The harmonic mean of precision and recall, 0 to 100; `parts` has that of each class.

    "macro" is the mean over classes, 0 for one that was neither found nor right; "micro" counts decisions over all
    classes, which is the accuracy unless `classes` leaves some out (as the "other" of a tagger). `classes` are those
    that occur unless given. Raises UserError for unequal lengths and for nothing at all.
    """
    check_pairs(found, wanted, "predictions")
    if average not in ("macro", "micro"):
        raise UserError(f"average must be 'macro' or 'micro', got '{average}'")
    names = sorted({*found, *wanted}, key=str) if classes is None else list(classes)
    if not names:
        raise UserError("there are no classes to score")
    right = Counter(a for a, b in zip(found, wanted) if a == b)
    said, true = Counter(found), Counter(wanted)
    parts = {str(name): _f1(right[name], said[name], true[name]) for name in names}
    if average == "macro":
        value = sum(parts.values()) / len(parts)
    else:
        value = _f1(*(sum(count[name] for name in names) for count in (right, said, true)))
    return ScoreRecord(
        f"{average} F1", value, f"average:{average}|classes:{len(names)}|items:{len(found)}", parts=parts
    )


def _f1(right: int, said: int, true: int) -> float:
    return 100 * 2 * right / (said + true) if said + true else 0.0
