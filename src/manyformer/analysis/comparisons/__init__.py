"""Comparisons: the cases of a file are trained and scored under equal conditions, with one table and one figure.

`compare("positions/extrapolation")` runs one; an interrupted comparison resumes from its last checkpoint.
"""

from manyformer.analysis.comparisons.compare import compare
from manyformer.analysis.comparisons.comparison_report import ComparisonResult
from manyformer.analysis.comparisons.training_task import CaseMeasurement

__all__ = ["CaseMeasurement", "ComparisonResult", "compare"]
