"""Claims about a comparison, and whether they hold: `alibi@256 <= alibi@64 + 0.03`, `step of short <= long * 0.9`."""

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from manyformer.errors import UserError, nearest

_CLAIM = re.compile(
    r"(?P<left>.+?)\s*(?P<sign><=|>=|<|>)\s*(?P<right>.+?)(?:\s+(?P<how>[-+*])\s*(?P<number>[\d.eE-]+))?"
)
_HOLDS: dict[str, Callable[[float, float], bool]] = {
    "<=": lambda a, b: a <= b,
    ">=": lambda a, b: a >= b,
    "<": lambda a, b: a < b,
    ">": lambda a, b: a > b,
}


class TableCell(NamedTuple):
    """A cell of the table: a case, and which value of the sweep."""

    case: str
    number: int


class ScoreClaim(NamedTuple):
    """A score at one place against that at another, or against a number, with something added or multiplied.

    `score` is its name, or a cost's.
    """

    text: str
    score: str
    left: TableCell
    sign: str
    right: TableCell | float
    how: str
    number: float


class ClaimVerdict(NamedTuple):
    """What became of a claim; `holds` is None where a value is missing."""

    text: str
    holds: bool | None
    measured: str

    @property
    def words(self) -> str:
        """One line for people."""
        says = {True: "holds", False: "DOES NOT HOLD", None: "cannot be told"}[self.holds]
        return f"{says}: {self.text} ({self.measured})"


def parse(
    text: str, cases: Sequence[str], values: Sequence[Any], scores: Sequence[str] = ("",), costs: Sequence[str] = ()
) -> ScoreClaim:
    """The claim that a line makes about the first score, or about the score or cost that it begins with.

    Costs know nothing of a sweep. Raises UserError with what would be right.
    """
    name, _, rest = text.strip().partition(" of ")
    if name not in (*scores, *costs):
        name, rest = scores[0], text.strip()
    found = _CLAIM.fullmatch(rest)
    if found is None:
        raise UserError(f"claims: '{text}' is none; write CASE@VALUE <= CASE@VALUE + 0.1, or a number at the right")
    swept = [None] if name in costs else values
    left = _place(found["left"], cases, swept, text)
    right = _number(found["right"])
    number = _number(found["number"] or "0")
    if number is None:
        raise UserError(f"claims: '{text}': {found['number']} is no number")
    there = _place(found["right"], cases, swept, text) if right is None else right
    return ScoreClaim(text.strip(), name, left, found["sign"], there, found["how"] or "+", number)


def judge(claim: ScoreClaim, mean: Callable[[TableCell], float | None]) -> ClaimVerdict:
    """Whether the claim holds of the means over seeds."""
    left = mean(claim.left)
    right = claim.right if isinstance(claim.right, float) else mean(claim.right)
    if left is None or right is None:
        return ClaimVerdict(claim.text, None, "a value is missing")
    bound = right * claim.number if claim.how == "*" else right + (claim.number if claim.how == "+" else -claim.number)
    return ClaimVerdict(claim.text, _HOLDS[claim.sign](left, bound), f"{left:.4g} against {bound:.4g}")


def _place(word: str, cases: Sequence[str], values: Sequence[Any], text: str) -> TableCell:
    case, at, value = word.strip().rpartition("@") if "@" in word else (word.strip(), "", "")
    if case not in cases:
        raise UserError(f"claims: '{text}': there is no case '{case}'; {nearest(case, cases)}")
    known = [str(one) for one in values]
    if bool(at) != (values[0] is not None):
        example = f"{case}@{known[0]}" if not at else case
        raise UserError(f"claims: '{text}': write {example}{'' if at else ', for one value of the sweep'}")
    if at and value not in known:
        raise UserError(f"claims: '{text}': the sweep has no value {value}; {nearest(value, known)}")
    return TableCell(case, known.index(value) if at else 0)


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None
