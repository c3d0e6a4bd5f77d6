"""Images from files, one after the other with their labels: what is the same for all kinds of files."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from manyformer.data.pixel_tokenizer import ImageShape
from manyformer.errors import UserError

PixelArray = NDArray[np.uint8]
ImagePart = str
"""The split that files name: "train", "valid" or "test"; "" where they name none."""

NAMES = {"train": "train", "training": "train", "valid": "valid", "val": "valid", "validation": "valid"} | {
    "dev": "valid",
    "test": "test",
    "testing": "test",
    "t10k": "test",
}
"""What files and folders call the splits."""


class ImageRecord(NamedTuple):
    """An image (h, w, c), its label where it has one, and where it stands, for messages."""

    pixels: PixelArray
    label: str | None
    where: str


class ImageCollection(ABC):
    """Images that can be read again and again, perhaps in several parts."""

    name: str

    @abstractmethod
    def parts(self) -> list[ImagePart]:
        """The parts there are."""

    @abstractmethod
    def labels(self, part: ImagePart) -> set[str]:
        """The labels of a part; empty where its images have none."""

    @abstractmethod
    def pictures(self, part: ImagePart) -> Iterator[ImageRecord]:
        """The images of a part in order."""

    @abstractmethod
    def stamp(self) -> list[str | int]:
        """What changes when the content does, without reading it all."""

    def choose(self, wanted: ImagePart) -> ImagePart:
        """The part of that name, or what has no name. Raises UserError where there is neither."""
        there = self.parts()
        if wanted in there:
            return wanted
        if "" in there:
            return ""
        raise UserError(f"{self.name}: there are no {wanted} images in it, only images for {', '.join(there)}")


class ImageResize(NamedTuple):
    """How images are made alike: the height and width to scale to, and the channels; None leaves them as they are."""

    size: int | None
    channels: int | None

    def apply(self, picture: ImageRecord) -> ImageRecord:
        """The image as asked for."""
        height, width, channels = picture.pixels.shape
        wanted = ImageShape(self.size or height, self.size or width, self.channels or channels)
        if wanted == (height, width, channels):
            return picture
        image = pillow()
        one = image.fromarray(picture.pixels[..., 0] if channels == 1 else picture.pixels)
        if wanted.channels != channels:
            one = one.convert("L" if wanted.channels == 1 else "RGB")
        if (wanted.height, wanted.width) != (height, width):
            # the mean of the pixels that fall together; bilinear between them where there are too few
            shrinks = wanted.height <= height and wanted.width <= width
            how = image.Resampling.BOX if shrinks else image.Resampling.BILINEAR
            one = one.resize((wanted.width, wanted.height), how)
        return picture._replace(pixels=as_pixels(np.asarray(one), picture.where))


def as_pixels(array: NDArray[Any], where: str) -> PixelArray:
    """An image (h, w) or (h, w, c) as (h, w, c). Raises UserError for anything but 1 or 3 channels of 0 to 255."""
    if array.dtype == np.bool_:
        array = array.astype(np.uint8) * np.uint8(255)
    if array.dtype != np.uint8:
        raise UserError(f"{where}: brightness must be whole numbers from 0 to 255 (uint8), and this is {array.dtype}")
    if array.ndim == 2:
        array = array[..., None]
    if array.ndim != 3 or array.shape[2] not in (1, 3):
        raise UserError(f"{where}: an image is height x width or height x width x 3, and this is {array.shape}")
    return array


def refuse_other_shape(picture: ImageRecord, first: ImageRecord) -> None:
    """Raise UserError where an image is not as large as the first."""
    shapes = ImageShape(*picture.pixels.shape), ImageShape(*first.pixels.shape)
    if shapes[0] != shapes[1]:
        raise UserError(
            f"{picture.where}: this image is {shapes[0]}, but {first.where} is {shapes[1]}; set data.size "
            "(and data.channels) to make all alike"
        )


def order_of_labels(labels: set[str]) -> tuple[str, ...]:
    """Numbers by their value, else by the alphabet."""
    if all(label.isdecimal() for label in labels):
        return tuple(sorted(labels, key=int))
    return tuple(sorted(labels))


def stamp_of_files(root: Path, files: list[Path]) -> list[str | int]:
    """The number of files, and a hash of their names, sizes and times."""
    total = hashlib.sha256()
    for file in files:
        facts = file.stat()
        total.update(f"{file.relative_to(root)}\0{facts.st_size}\0{facts.st_mtime_ns}\n".encode())
    return [str(root.resolve()), len(files), total.hexdigest()]


def pillow() -> Any:
    """The `PIL.Image` module. Raises UserError where it is not installed."""
    try:
        from PIL import Image
    except ImportError:
        raise UserError("reading and scaling images needs Pillow: pip install 'manyformer[data]'") from None
    return Image
