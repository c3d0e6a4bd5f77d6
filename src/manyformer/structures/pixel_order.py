"""The order in which the values of an image form a sequence: raster order, or block by block."""

import numpy as np
from numpy.typing import NDArray

from manyformer.errors import UserError


def pixel_order(shape: tuple[int, int, int], block: tuple[int, int]) -> NDArray[np.int64]:
    """The raster index of the image value (height, width, channels) at each position of the sequence.

    Raster indices count row by row, the channels of a pixel together. Pixels are in raster order within a block of
    (rows, columns), and so are blocks within the image (Parmar et al. 2018, section 3.3); blocks of one complete row
    give raster order. Raises UserError if the blocks do not divide the image.
    """
    height, width, channels = shape
    rows, columns = block
    if min(block) < 1 or height % rows or width % columns:
        raise UserError(f"an image of {height} x {width} cannot be cut into blocks of {rows} x {columns}")
    indices = np.arange(height * width * channels)
    blocks = indices.reshape(height // rows, rows, width // columns, columns, channels)
    return blocks.swapaxes(1, 2).ravel()
