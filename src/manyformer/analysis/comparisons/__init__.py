"""Comparisons: the cases of a file are trained and scored under equal conditions, with one table and one figure.

`compare("positions/extrapolation")` runs one; an interrupted comparison resumes from its last checkpoint.
`advise(length=2000)` says which recipes to take, from what was measured. Names are imported when they are first used,
since advice needs no torch.
"""

from typing import TYPE_CHECKING

from manyformer.base.lazy_names import offer_names as _offer_names

if TYPE_CHECKING:
    from manyformer.analysis.comparisons.advice import Advice, AdviceRow, Candidate
    from manyformer.analysis.comparisons.advise import advise
    from manyformer.analysis.comparisons.compare import compare
    from manyformer.analysis.comparisons.comparison_report import ComparisonResult
    from manyformer.analysis.comparisons.training_task import CaseMeasurement

_MODULES = {
    "Advice": "manyformer.analysis.comparisons.advice",
    "AdviceRow": "manyformer.analysis.comparisons.advice",
    "Candidate": "manyformer.analysis.comparisons.advice",
    "CaseMeasurement": "manyformer.analysis.comparisons.training_task",
    "ComparisonResult": "manyformer.analysis.comparisons.comparison_report",
    "advise": "manyformer.analysis.comparisons.advise",
    "compare": "manyformer.analysis.comparisons.compare",
}

__all__ = ["Advice", "AdviceRow", "Candidate", "CaseMeasurement", "ComparisonResult", "advise", "compare"]

_offer_names(__name__, _MODULES)
