"""The record of a score, with a signature of how it was computed, and the one rule by which scores are compared.

A score that is no finite number is never the best."""

import math
from collections.abc import Sized
from dataclasses import dataclass, field
from typing import NamedTuple

from manyformer.base.errors import UserError


@dataclass(frozen=True)
class ScoreRecord:
    """A score with its `signature`: two scores are comparable if their signatures are equal.

    `parts` are its components, such as the F1 of each class or BLEU's precisions.
    """

    name: str
    value: float
    signature: str
    digits: int = 2
    parts: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.name} {self.value:.{self.digits}f} ({self.signature})"


class ScoreKind(NamedTuple):
    """How a score is displayed: its unit, whether lower is better, and the number of decimal digits."""

    unit: str = ""
    lower_is_better: bool = False
    digits: int = 2


def check_pairs(predictions: Sized, references: Sized, item_name: str) -> None:
    """Raise UserError for empty input or unequal numbers of predictions and references."""
    if len(predictions) != len(references):
        raise UserError(
            f"{len(predictions)} {item_name} cannot be scored against {len(references)} references: give one for each"
        )
    if not len(predictions):
        raise UserError(f"there are no {item_name} to score")


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
