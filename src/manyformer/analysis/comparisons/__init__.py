"""Comparisons: the cases of a file are trained and scored under equal conditions, with one table and one figure.

`compare("positions/extrapolation")` runs one; an interrupted comparison resumes from its last checkpoint.
"""

from typing import TYPE_CHECKING

from manyformer.base.lazy_names import offer_names as _offer_names

if TYPE_CHECKING:
    from manyformer.analysis.comparisons.compare import compare
    from manyformer.analysis.comparisons.comparison_report import ComparisonResult
    from manyformer.analysis.comparisons.training_task import CaseMeasurement

_MODULES = {
    "CaseMeasurement": "manyformer.analysis.comparisons.training_task",
    "ComparisonResult": "manyformer.analysis.comparisons.comparison_report",
    "compare": "manyformer.analysis.comparisons.compare",
}

__all__ = ["CaseMeasurement", "ComparisonResult", "compare"]


_offer_names(__name__, _MODULES)
