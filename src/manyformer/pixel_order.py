"""The order in which the values of an image are read and written: row by row, or block by block."""

import numpy as np
from numpy.typing import NDArray

from manyformer.errors import UserError


def pixel_order(shape: tuple[int, int, int], block: tuple[int, int]) -> NDArray[np.int64]:
    """For each place of the sequence, which value of the image (height, width, channels) stands there.

    Values are numbered row by row, the channels of a pixel together. Pixels come row by row within a block of (rows,
    columns), and so do blocks within the image (Parmar et al. 2018, section 3.3); a block of one whole row leaves them
    as they are. Raises UserError where blocks do not divide the image.
    """
    (height, width, channels), (rows, columns) = shape, block
    if min(block) < 1 or height % rows or width % columns:
        raise UserError(f"an image of {height} x {width} cannot be cut into blocks of {rows} x {columns}")
    numbers = np.arange(height * width * channels)
    cut = numbers.reshape(height // rows, rows, width // columns, columns, channels)
    return cut.swapaxes(1, 2).ravel()
