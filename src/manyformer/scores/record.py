"""What every score is: a number, its name, and how exactly it was computed."""

from collections.abc import Sized
from dataclasses import dataclass, field

from manyformer.errors import UserError


@dataclass(frozen=True)
class ScoreRecord:
    """One number with its `signature`: two scores may be compared where their signatures agree.

    `parts` holds what it was made of, such as the F1 of each class or BLEU's precisions.
    """

    name: str
    value: float
    signature: str
    digits: int = 2
    parts: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.name} {self.value:.{self.digits}f} ({self.signature})"


def check_pairs(found: Sized, wanted: Sized, what: str) -> None:
    """Raise UserError where there is nothing to score, or not one of each."""
    if len(found) != len(wanted):
        raise UserError(f"{len(found)} {what} cannot be scored against {len(wanted)} references: give one for each")
    if not len(found):
        raise UserError(f"there are no {what} to score")
