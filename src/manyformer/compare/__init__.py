"""Comparisons: the cases of a file are trained alike, scored alike and told in one table and one picture.

`compare("positions/extrapolation")` does it all; a killed one goes on where it was.
"""

from manyformer.compare.compare import compare
from manyformer.compare.comparison_report import CaseMeasurement, ComparisonResult

__all__ = ["CaseMeasurement", "ComparisonResult", "compare"]
