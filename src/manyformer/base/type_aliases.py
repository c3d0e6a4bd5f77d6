"""Type aliases that several packages share."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
ImageArray = NDArray[np.uint8]
"""Images (n, height, width, channels)."""

LogFn = Callable[[str], None]
"""Takes one line for a person."""

ProgressFn = Callable[[float], None]
"""Takes the fraction of the work that is done, 0 to 1."""
