"""Comparisons: the cases of a file are trained alike, scored alike and told in one table and one picture.

`compare("positions/extrapolation")` does it all; a killed one goes on where it was.
"""

from manyformer.compare.report import Compared, Measured
from manyformer.compare.verb import compare

__all__ = ["Compared", "Measured", "compare"]
