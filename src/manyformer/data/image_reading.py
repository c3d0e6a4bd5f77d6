"""The interface of images with labels, and operations shared by all file formats."""

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from manyformer.data.findings import ChangeCounts
from manyformer.data.image_decoding import pillow
from manyformer.data.pixel_tokenizer import ImageShape
from manyformer.data.splits import DataSource
from manyformer.errors import UserError

PixelArray = NDArray[np.uint8]
ImagePart = str
"""The split named by files: "train", "valid" or "test"; "" if they name none."""

SPLIT_NAMES = {"train": "train", "training": "train", "valid": "valid", "val": "valid", "validation": "valid"} | {
    "dev": "valid",
    "test": "test",
    "testing": "test",
    "t10k": "test",
}
"""Names of splits in file and folder names."""


class ImageRecord(NamedTuple):
    """An image (h, w, c), its label or None, its location for messages, and what was changed in it."""

    pixels: PixelArray
    label: str | None
    location: str
    changes: tuple[str, ...] = ()
    """Keys of `manyformer.data.image_decoding.CHANGES`."""


class ImageSource(DataSource):
    """The images of one split of a file or folder; `part` is "" if the files name no split."""

    def __init__(self, name: str, part: ImagePart, stamp: list[str | int]) -> None:
        self.name = name
        self.part = part
        self._stamp = stamp

    @abstractmethod
    def labels(self) -> set[str]:
        """The labels; empty if the images have none."""

    @abstractmethod
    def images(self) -> Iterator[ImageRecord]:
        """Stream the images in order."""

    def stamp(self) -> list[str | int]:
        return [*self._stamp, self.part]


class ImageResize(NamedTuple):
    """Conversion of images to one height and width `size` and to `channels` channels; None leaves them unchanged."""

    size: int | None
    channels: int | None

    def apply(self, record: ImageRecord) -> ImageRecord:
        """The resized and converted image."""
        height, width, channels = record.pixels.shape
        target = ImageShape(self.size or height, self.size or width, self.channels or channels)
        if target == (height, width, channels):
            return record
        pil = pillow()
        resized = pil.fromarray(record.pixels[..., 0] if channels == 1 else record.pixels)
        if target.channels != channels:
            resized = resized.convert("L" if target.channels == 1 else "RGB")
        if (target.height, target.width) != (height, width):
            # box averages for shrinking, bilinear interpolation for enlarging
            shrinks = target.height <= height and target.width <= width
            if shrinks:
                resample = pil.Resampling.BOX
            else:
                resample = pil.Resampling.BILINEAR
            resized = resized.resize((target.width, target.height), resample)
        changes = list(record.changes)
        if target.height > height or target.width > width:
            changes.append("enlarged")
        if height * target.width != width * target.height:
            changes.append("stretched")
        if target.channels != channels:
            changes.append("gray" if target.channels == 1 else "colored")
        return record._replace(pixels=as_pixels(np.asarray(resized), record.location), changes=tuple(changes))


def count_changes(counts: ChangeCounts, record: ImageRecord) -> None:
    """Count what was changed in an image."""
    for change in record.changes:
        counts.add(change, record.location)


def as_pixels(array: NDArray[Any], location: str) -> PixelArray:
    """An image (h, w) or (h, w, c) as uint8 (h, w, c). Raises UserError unless it has 1 or 3 channels of 0 to 255."""
    if array.dtype == np.bool_:
        array = array.astype(np.uint8) * np.uint8(255)
    if array.dtype != np.uint8:
        raise UserError(f"{location}: pixels must be integers from 0 to 255 (uint8), but they are {array.dtype}")
    if array.ndim == 2:
        array = array[..., None]
    if array.ndim != 3 or array.shape[2] not in (1, 3):
        raise UserError(f"{location}: an image must have the shape (h, w) or (h, w, 3), but it has {array.shape}")
    return array


def check_same_shape(record: ImageRecord, reference: ImageRecord) -> None:
    """Raise UserError if two images differ in shape."""
    shapes = ImageShape(*record.pixels.shape), ImageShape(*reference.pixels.shape)
    if shapes[0] != shapes[1]:
        raise UserError(
            f"{record.location}: this image is {shapes[0]}, but {reference.location} is {shapes[1]}; set data.size "
            "(and data.channels) to convert all to one shape"
        )


def sort_labels(labels: set[str]) -> tuple[str, ...]:
    """Sort labels by value if all are numbers, else alphabetically."""
    if all(label.isdecimal() for label in labels):
        # 1 and 01 are two labels of one value
        return tuple(sorted(labels, key=lambda label: (int(label), label)))
    return tuple(sorted(labels))
