"""Animated pictures of episodes."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from manyformer.errors import UserError
from manyformer.files.atomic_files import atomic_write


def check_animation(path: Path) -> None:
    """Raise UserError if the suffix of the path is not that of an animated picture."""
    if path.suffix.lower() != ".gif":
        raise UserError(f"{path}: an episode is drawn as .gif, not as '{path.suffix}'")


def write_animation(frames: Sequence[NDArray[np.uint8]], path: Path, *, milliseconds: int) -> None:
    """Write frames (height, width, 3) as a GIF that is repeated endlessly. Raises UserError where Pillow is missing."""
    check_animation(path)
    try:
        from PIL import Image
    except ImportError as error:
        raise UserError('animations need one more library: pip install "manyformer[data]"') from error
    first, *rest = (Image.fromarray(frame) for frame in frames)
    with atomic_write(path) as file:
        first.save(file, format="GIF", save_all=True, append_images=rest, duration=milliseconds, loop=0)
