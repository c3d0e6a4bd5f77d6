"""Whether what is said of measured scores holds: claims, and differences of cases over seeds.

Claims are such as `alibi@256 <= alibi@64 + 0.03` or `step of short <= long * 0.9`; differences are judged by paired
t-tests, adjusted for the number of comparisons."""

import math
import operator
import re
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from manyformer.base.errors import UserError, suggest_names

_CLAIM = re.compile(
    r"(?P<left>.+?)\s*(?P<comparison><=|>=|<|>)\s*(?P<right>.+?)(?:\s+(?P<operator>[-+*])\s*(?P<operand>[\d.eE-]+))?"
)

_COMPARISONS = {"<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt}
_OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}

SIGNIFICANCE_LEVEL = 0.05


class TableCell(NamedTuple):
    """A cell of the table: a case, and the index of a value of the sweep."""

    case: str
    value_index: int


class ScoreClaim(NamedTuple):
    """A score of one cell compared with that of another cell, or with a number, plus, minus or times `operand`.

    `score` is the name of a score or of a cost.
    """

    text: str
    score: str
    left: TableCell
    comparison: str
    right: TableCell | float
    operator: str
    operand: float


class ClaimVerdict(NamedTuple):
    """Whether a claim holds, None if a value is missing, and the measured values."""

    text: str
    holds: bool | None
    measured: str

    @property
    def summary_line(self) -> str:
        """The verdict in one line of text."""
        verdict = {True: "holds", False: "DOES NOT HOLD", None: "cannot be checked"}[self.holds]
        return f"{verdict}: {self.text} ({self.measured})"


def parse_claim(
    text: str, cases: Sequence[str], values: Sequence[Any], scores: Sequence[str] = ("",), costs: Sequence[str] = ()
) -> ScoreClaim:
    """Parse a claim about the first score, or about the score or cost named before " of ".

    Costs have no sweep values. Raises UserError that gives the correct form.
    """
    name, _, statement = text.strip().partition(" of ")
    # a case may contain " of " in its name: then the statement is about the first score
    if name not in (*scores, *costs):
        name = scores[0]
        statement = text.strip()
    match = _CLAIM.fullmatch(statement)
    if match is None:
        raise UserError(
            f"claims: '{text}' is no claim; write CASE@VALUE <= CASE@VALUE + 0.1, or a number on the right side"
        )
    sweep_values = [None] if name in costs else values
    left = _parse_cell(match["left"], cases, sweep_values, text)
    right_number = _parse_number(match["right"])
    operand = _parse_number(match["operand"] or "0")
    if operand is None:
        raise UserError(f"claims: '{text}': {match['operand']} is no number")
    right_side = _parse_cell(match["right"], cases, sweep_values, text) if right_number is None else right_number
    return ScoreClaim(text.strip(), name, left, match["comparison"], right_side, match["operator"] or "+", operand)


def judge_claim(claim: ScoreClaim, mean: Callable[[TableCell], float | None]) -> ClaimVerdict:
    """Check the claim on means over seeds."""
    left = mean(claim.left)
    right = claim.right if isinstance(claim.right, float) else mean(claim.right)
    if left is None or right is None:
        return ClaimVerdict(claim.text, None, "a value is missing")
    bound = _OPERATIONS[claim.operator](right, claim.operand)
    return ClaimVerdict(claim.text, _COMPARISONS[claim.comparison](left, bound), f"{left:.4g} against {bound:.4g}")


def _parse_cell(cell: str, cases: Sequence[str], values: Sequence[Any], text: str) -> TableCell:
    case, separator, value = cell.strip().rpartition("@")
    if not separator:
        # without one, rpartition gives all as the value
        case = value
    if case not in cases:
        raise UserError(f"claims: '{text}': there is no case '{case}'; {suggest_names(case, cases)}")
    value_names = [str(sweep_value) for sweep_value in values]
    is_swept = values[0] is not None
    if is_swept and not separator:
        raise UserError(f"claims: '{text}': write {case}@{value_names[0]}, for one value of the sweep")
    if separator and not is_swept:
        raise UserError(f"claims: '{text}': write {case}")
    if not separator:
        return TableCell(case, 0)
    if value not in value_names:
        raise UserError(f"claims: '{text}': the sweep has no value {value}; {suggest_names(value, value_names)}")
    return TableCell(case, value_names.index(value))


def _parse_number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def paired_t_test(first: Sequence[float], second: Sequence[float]) -> float | None:
    """The two-sided p-value of Student's t-test on the paired differences; None where the test has no value.

    It has none for fewer than two pairs, for numbers that are not finite, and where all differences are equal but 0:
    their spread says nothing about chance then. Where all pairs are equal the value is 1."""
    if not all(map(math.isfinite, [*first, *second])):
        return None
    differences = [a - b for a, b in zip(first, second, strict=True)]
    if len(differences) < 2:
        return None
    mean = statistics.fmean(differences)
    deviation = statistics.stdev(differences)
    # differences of decimals such as 0.3 - 0.1 are equal but for the rounding of their last digit
    rounding = 4 * sys.float_info.epsilon * max(map(abs, [*first, *second]))
    if deviation <= rounding:
        if abs(mean) <= rounding:
            return 1.0
        return None
    return student_t_tails(mean / (deviation / math.sqrt(len(differences))), len(differences) - 1)


def student_t_tails(t: float, degrees: int) -> float:
    """The probability of a value at least as far from 0 as `t` (Abramowitz and Stegun 1964, 26.7.3 and 26.7.4)."""
    if degrees < 1:
        raise ValueError(f"student_t_tails: degrees ({degrees}) must be at least 1")
    angle = math.atan(abs(t) / math.sqrt(degrees))
    # series in closed form for whole degrees: scipy is not needed for one function
    sine = math.sin(angle)
    cosine = math.cos(angle)
    is_odd = degrees % 2
    term = cosine if is_odd else 1.0
    total = 0.0
    for k in range(1 + is_odd, degrees, 2):
        total += term
        term *= k / (k + 1) * cosine**2
    if is_odd:
        inside = 2 / math.pi * (angle + sine * total)
    else:
        inside = sine * total
    return max(0.0, 1.0 - inside)


def holm_adjusted(p_values: Mapping[str, float]) -> dict[str, float]:
    """The p-values of several tests, adjusted so that one level holds for all together (Holm 1979)."""
    adjusted: dict[str, float] = {}
    largest = 0.0
    for rank, name in enumerate(sorted(p_values, key=lambda name: p_values[name])):
        # adjusted values never fall with rank, so that a larger p is never called more significant
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[name]))
        adjusted[name] = largest
    return adjusted
