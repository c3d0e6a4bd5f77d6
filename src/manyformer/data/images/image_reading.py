"""Images with their labels: image files as 8-bit pixels, by the same rules for every command, and conversions of them.

- An image is turned and mirrored as its EXIF orientation says, all eight values.
- Gray images (1 bit, gray, gray with transparency) have one channel, all others three, palettes and CMYK as well.
- Of 16 bits a channel the upper 8 are taken. Integers of more bits, integers with signs and floating point numbers
  have no range that says what is white, and are refused.
- Transparency is dropped: pixels have the colors that the file gives them, also where nobody would see them.
- Color profiles are not applied.
- Of several frames or pages the first is read.

These are the rules by which the pipelines of transformers read images, but for 16 bits of gray, which Pillow cuts off
at 255. Whatever changes an image is named in `DecodedImage.changes`."""

import re
import struct
import warnings
import zlib
from abc import abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from manyformer.base.errors import UserError
from manyformer.data.pipeline.splits import DataSource
from manyformer.data.pipeline.summary import ChangeCounts
from manyformer.data.tokenizers.pixel_tokenizer import ImageShape

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
MAX_PIXELS = 89_478_485
"""The most pixels of an image file: a quarter of a GiB of three channels."""
FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "PPM", "TIFF")
"""The formats that are read, by content and whatever the name; others may start programs (EPS) or mean no image."""
CHANGES = {
    "turned": "turned as the EXIF orientation says",
    "deep": "reduced from 16 bits a channel to the upper 8",
    "transparent": "read without transparency, with colors as the file has them",
    "cmyk": "converted from CMYK to RGB",
    "profile": "read without applying a color profile (not sRGB)",
    "frames": "read without all frames or pages but the first",
    "enlarged": "enlarged",
    "stretched": "stretched to another ratio of height and width",
    "gray": "converted from colors to gray",
    "colored": "converted from gray to three equal channels",
}
"""Changes of images, in words for a person that follow their number."""
_ORIENTATION = 0x0112
_PHOTOMETRIC = 262
_WHITE_IS_ZERO = 0
_GRAY_MODES = frozenset({"1", "L", "LA", "La"})
_COLOR_MODES = frozenset({"P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr"})
_PREMULTIPLIED = {"La": "LA", "RGBa": "RGBA"}
_DEEP_RAW_MODE = re.compile(r"(I;16[LBN]?|.*;16[LBN])")
_SRGB = (b"sRGB", "sRGB".encode("utf-16-be"))
# what Pillow raises for damaged and unknown files
_PILLOW_ERRORS = (OSError, SyntaxError, ValueError, EOFError, KeyError, TypeError, IndexError, OverflowError)


class ImageRecord(NamedTuple):
    """An image (h, w, c), its label or None, its location for messages, and what was changed in it."""

    pixels: PixelArray
    label: str | None
    location: str
    changes: tuple[str, ...] = ()
    """Keys of `manyformer.data.images.image_reading.CHANGES`."""


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
        # pixels that fit are passed on as they are, without Pillow and without rounding
        if target == (height, width, channels):
            return record
        pil = pillow()
        # Pillow takes gray images without an axis of channels
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
    # masks: True is white
    if array.dtype == np.bool_:
        array = array.astype(np.uint8) * np.uint8(255)
    if array.dtype != np.uint8:
        raise UserError(f"{location}: pixels must be integers from 0 to 255 (uint8), but they are {array.dtype}")
    # every image has an axis of channels from here on
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


class DecodedImage(NamedTuple):
    """The pixels (h, w) or (h, w, 3) of an image file, and what was changed in them: keys of `CHANGES`."""

    pixels: NDArray[np.uint8]
    changes: tuple[str, ...]


def decode_image(path: Path) -> DecodedImage:
    """The first image of a file, by the rules of this module. Raises UserError with the name of the file."""
    pil = pillow()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # Pillow warns of images that may fill the memory, and raises an error for larger ones
            warnings.simplefilter("error", pil.DecompressionBombWarning)
            # of a TIFF whose tags are cut off
            warnings.filterwarnings("error", message="Truncated File Read")
            # as a file: given a path, Pillow maps a TIFF into memory, and mixes up the sides of one that is turned
            with path.open("rb") as file, pil.open(file, formats=FORMATS) as opened:
                return _decode(opened, path)
    except (pil.DecompressionBombWarning, pil.DecompressionBombError):
        raise _too_many_pixels(path) from None
    except UserError:
        raise
    except pil.UnidentifiedImageError:
        raise UserError(
            f"{path}: Pillow cannot read this image (its content is none of {', '.join(FORMATS)})"
        ) from None
    except (*_PILLOW_ERRORS, UserWarning, RuntimeError, zlib.error, struct.error, MemoryError) as error:
        raise UserError(f"{path}: Pillow cannot read this image ({error})") from error


def pillow() -> Any:
    """The `PIL.Image` module. Raises UserError if it is not installed."""
    try:
        from PIL import Image
    except ImportError:
        raise UserError("reading and scaling images needs Pillow: pip install 'manyformer[data]'") from None
    return Image


def _decode(opened: Any, path: Path) -> DecodedImage:
    """The pixels of an image of Pillow whose header alone has been read."""
    from PIL import ImageOps

    # by the header, before any pixel is unpacked
    if opened.width * opened.height > MAX_PIXELS:
        raise _too_many_pixels(path)
    # the raw mode of 16 bits is known only until the pixels are loaded
    is_deep = _is_deep(opened, path)
    orientation = opened.getexif().get(_ORIENTATION)
    profile = opened.info.get("icc_profile")
    opened.load()
    image = ImageOps.exif_transpose(opened)
    if is_deep and image.mode.startswith("I"):
        shallow = _upper_bits(image)
    else:
        shallow = image
    pixels = np.asarray(shallow.convert("L" if shallow.mode in _GRAY_MODES else "RGB"))
    occurrences = {
        "turned": orientation in range(2, 9),
        "deep": is_deep,
        "transparent": _is_transparent(shallow),
        "cmyk": image.mode == "CMYK",
        "profile": isinstance(profile, bytes) and not any(name in profile for name in _SRGB),
        # asked last: it may go on to the next frame
        "frames": bool(getattr(opened, "is_animated", False)),
    }
    return DecodedImage(pixels, tuple(change for change, occurs in occurrences.items() if occurs))


def _is_deep(opened: Any, path: Path) -> bool:
    """Whether channels have 16 bits. Raises UserError for pixels without a range that says what is white."""
    mode = opened.mode
    raw_modes = [_raw_mode(tile) for tile in opened.tile]
    if mode == "I" and opened.format in ("PNG", "PPM"):
        # 16 bits, of which older versions of Pillow make 32
        return True
    if mode.startswith("I;16"):
        if not all(_DEEP_RAW_MODE.fullmatch(raw_mode) for raw_mode in raw_modes):
            raise _no_range(path, f"integers of an unusual number of bits ({raw_modes[0]})")
        if opened.format == "TIFF" and opened.tag_v2.get(_PHOTOMETRIC) == _WHITE_IS_ZERO:
            raise _no_range(path, "16-bit integers of which 0 is white")
        return True
    if mode.startswith("I"):
        raise _no_range(path, "integers of 32 bits or with signs")
    if mode == "F":
        raise _no_range(path, "floating point numbers")
    if mode not in _GRAY_MODES | _COLOR_MODES:
        raise UserError(f"{path}: the pixels of this image are of mode {mode}, which is not read; save it as RGB")
    has_deep_maximum = opened.format == "PPM" and any(_largest_level(tile) > 255 for tile in opened.tile)
    return has_deep_maximum or any(_DEEP_RAW_MODE.fullmatch(raw_mode) for raw_mode in raw_modes)


def _raw_mode(tile: Any) -> str:
    """Pillow's name for the way in which the pixels of a part of an image are stored."""
    arguments = tile[3]
    if isinstance(arguments, tuple) and arguments:
        first = arguments[0]
    else:
        first = arguments
    if isinstance(first, str):
        return first
    return ""


def _largest_level(tile: Any) -> int:
    """The level of a PPM file that is white, 0 where Pillow need not know it."""
    arguments = tile[3]
    if isinstance(arguments, tuple):
        return max((value for value in arguments if type(value) is int), default=0)
    return 0


def _upper_bits(image: Any) -> Any:
    """A gray image of 16 bits with the upper 8 bits of each pixel."""
    return pillow().fromarray((np.asarray(image) >> 8).astype(np.uint8))


def _is_transparent(image: Any) -> bool:
    """Whether a pixel is not opaque."""
    if image.mode in _PREMULTIPLIED:
        image = image.convert(_PREMULTIPLIED[image.mode])
    elif "transparency" in image.info and image.mode in ("1", "L", "P", "RGB"):
        image = image.convert("RGBA")
    if "A" not in image.getbands():
        return False
    lowest, _ = image.getchannel("A").getextrema()
    return bool(lowest < 255)


def _no_range(path: Path, kind: str) -> UserError:
    return UserError(
        f"{path}: the pixels of this image are {kind}, which do not say what is white; save it with 8 or 16 bits of "
        "each channel"
    )


def _too_many_pixels(path: Path) -> UserError:
    return UserError(f"{path}: this image has more than {MAX_PIXELS:,} pixels; scale it down before")
