"""Comparisons: the cases of a file are trained and scored under equal conditions, with one table and one figure.

`compare("positions/extrapolation")` runs one; an interrupted comparison resumes from its last checkpoint.
"""

from manyformer.compare.compare import compare
from manyformer.compare.comparison_report import ComparisonResult
from manyformer.compare.training_task import CaseMeasurement

__all__ = ["CaseMeasurement", "ComparisonResult", "compare"]
