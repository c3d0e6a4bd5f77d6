"""Images in NumPy archives, in IDX files as MNIST has them, and in folders of image files."""

import struct
import zipfile
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from manyformer.data.image_reading import (
    NAMES,
    ImageCollection,
    ImagePart,
    ImageRecord,
    as_pixels,
    pillow,
    stamp_of_files,
)
from manyformer.data.text_files import existing_path, kind_of, open_bytes
from manyformer.data.text_sources import stamp_of
from manyformer.errors import UserError

ENDINGS = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".pgm", ".ppm", ".pbm", ".tif", ".tiff"})
"""What a folder is searched for."""

_IMAGES, _LABELS = frozenset({"x", "images", "image"}), frozenset({"y", "labels", "label"})
_UBYTE = 8


def open_image_files(path: str) -> ImageCollection:
    """The images at `path`: an .npz file, an IDX file, or a folder. Raises UserError where it is none of these."""
    place = existing_path(path)
    if place.is_dir():
        idx = _idx_files(place)
        return IdxImages(place, idx) if idx else FolderImages(place)
    if kind_of(place) == ".npz":
        return NpzImages(place)
    if "ubyte" in place.name or "idx" in place.name:
        return IdxImages(place, {"": place})
    raise UserError(
        f"{place}: images come as a NumPy archive (.npz), an IDX file (such as train-images-idx3-ubyte.gz), "
        "or a folder of image files or IDX files"
    )


class _Arrays(ImageCollection):
    """Images that are read as whole arrays."""

    def __init__(self, path: Path) -> None:
        self._path, self.name = path, str(path)
        self._held: dict[ImagePart, tuple[NDArray[Any], NDArray[Any] | None]] = {}

    def labels(self, part: ImagePart) -> set[str]:
        labels = self._read(part)[1]
        return set() if labels is None else {str(label) for label in np.unique(labels)}

    def pictures(self, part: ImagePart) -> Iterator[ImageRecord]:
        images, labels = self._read(part)
        for number, image in enumerate(images):
            where = f"{self.name}: image {number}" + (f" of {part}" if part else "")
            yield ImageRecord(as_pixels(image, where), None if labels is None else str(labels[number]), where)

    def _read(self, part: ImagePart) -> tuple[NDArray[Any], NDArray[Any] | None]:
        if part not in self._held:
            images, labels = self._arrays(part)
            if images.ndim not in (3, 4):
                raise UserError(f"{self.name}: images are an array of 3 or 4 axes, and this one is {images.shape}")
            if labels is not None and (labels.ndim != 1 or len(labels) != len(images)):
                raise UserError(
                    f"{self.name}: {len(images):,} images need as many labels in one row, and these are {labels.shape}"
                )
            self._held[part] = images, labels
        return self._held[part]

    def _arrays(self, part: ImagePart) -> tuple[NDArray[Any], NDArray[Any] | None]:
        raise NotImplementedError


@final
class NpzImages(_Arrays):
    """A NumPy archive with arrays such as `x` and `y`, `train_x` and `test_x`, `x_train`, or `train_images`."""

    def parts(self) -> list[ImagePart]:
        return list(self._images)

    def stamp(self) -> list[str | int]:
        return stamp_of(self._path)

    @cached_property
    def _file(self) -> Any:
        # numpy leaves a file open that turns out to be none of its own
        if not zipfile.is_zipfile(self._path):
            raise UserError(f"{self._path}: this is not a whole NumPy archive (.npz)")
        return np.load(self._path)

    @cached_property
    def _images(self) -> dict[ImagePart, str]:
        found = self._named(_IMAGES)
        if not found:
            there = ", ".join(self._file.files) or "nothing"
            raise UserError(f"{self._path}: there are no images in it; it holds {there}, and x or train_x is needed")
        return found

    def _named(self, words: frozenset[str]) -> dict[ImagePart, str]:
        """The arrays whose names have one of these words, by the split that the rest of the name tells."""
        found: dict[ImagePart, str] = {}
        for name in self._file.files:
            split = name.lower().split("_")
            others = [word for word in split if word not in words]
            if len(others) < len(split) and all(word in NAMES for word in others):
                found[NAMES[others[0]] if others else ""] = name
        return found

    def _arrays(self, part: ImagePart) -> tuple[NDArray[Any], NDArray[Any] | None]:
        labels = self._named(_LABELS).get(part)
        return self._array(self._images[part]), None if labels is None else self._array(labels)

    def _array(self, name: str) -> NDArray[Any]:
        try:
            found: NDArray[Any] = self._file[name]
        except (OSError, ValueError, zipfile.BadZipFile, EOFError) as error:
            raise UserError(f"{self._path}: the array {name} cannot be read ({error})") from error
        return found


@final
class IdxImages(_Arrays):
    """IDX files (yann.lecun.com/exdb/mnist), plain or gzipped, labels beside the images under the usual names."""

    def __init__(self, path: Path, images: dict[ImagePart, Path]) -> None:
        super().__init__(path)
        self._images = images

    def parts(self) -> list[ImagePart]:
        return list(self._images)

    def stamp(self) -> list[str | int]:
        files = [file for one in self._images.values() for file in (one, _labels_of(one)) if file.is_file()]
        return stamp_of_files(files[0].parent, files)

    def _arrays(self, part: ImagePart) -> tuple[NDArray[Any], NDArray[Any] | None]:
        images = self._images[part]
        labels = _labels_of(images)
        return read_idx(images), read_idx(labels) if labels != images and labels.is_file() else None


@final
class FolderImages(ImageCollection):
    """Image files, the folder that one lies in being its label; above those there may be folders train, valid, test."""

    def __init__(self, path: Path) -> None:
        self._path, self.name = path, str(path)

    @cached_property
    def _files(self) -> dict[ImagePart, list[Path]]:
        found: dict[ImagePart, list[Path]] = {}
        for file in sorted(self._path.rglob("*")):
            inside = file.relative_to(self._path).parts
            if file.suffix.lower() in ENDINGS and not any(name.startswith(".") for name in inside):
                part = NAMES.get(inside[0].lower(), "") if len(inside) > 1 else ""
                found.setdefault(part, []).append(file)
        if not found:
            raise UserError(f"{self._path}: this folder holds no images (looked for {' '.join(sorted(ENDINGS))})")
        return found

    def parts(self) -> list[ImagePart]:
        return list(self._files)

    def labels(self, part: ImagePart) -> set[str]:
        found = {self._label(file, part) for file in self._files[part]}
        return {label for label in found if label is not None}

    def pictures(self, part: ImagePart) -> Iterator[ImageRecord]:
        for file in self._files[part]:
            yield ImageRecord(_read_image(file), self._label(file, part), str(file))

    def stamp(self) -> list[str | int]:
        return stamp_of_files(self._path, [file for files in self._files.values() for file in files])

    def _label(self, file: Path, part: ImagePart) -> str | None:
        inside = file.relative_to(self._path).parts[1 if part else 0 : -1]
        return inside[-1] if inside else None


def read_idx(path: Path) -> NDArray[np.uint8]:
    """The array of an IDX file of bytes. Raises UserError where it is none, or not whole."""
    with open_bytes(path) as file:
        content = file.read()
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] != _UBYTE:
        begin = content[:4].hex(" ")
        raise UserError(f"{path}: this is not an IDX file of bytes; it begins with {begin}, and 00 00 08 is due")
    axes = content[3]
    head = 4 + 4 * axes
    if len(content) < head:
        raise UserError(f"{path}: this file is not whole: it ends within its head")
    shape = struct.unpack(f">{axes}I", content[4:head])
    size = int(np.prod(shape, dtype=np.int64))
    if len(content) - head != size:
        told = " x ".join(map(str, shape))
        raise UserError(f"{path}: this file is not whole: it promises {told} bytes and holds {len(content) - head:,}")
    return np.frombuffer(content, dtype=np.uint8, offset=head).reshape(shape)


def _idx_files(folder: Path) -> dict[ImagePart, Path]:
    """The image files in a folder that holds IDX files, by the split that their names begin with."""
    found: dict[ImagePart, Path] = {}
    for file in sorted(folder.iterdir()):
        if "images" in file.name and "idx3" in file.name and file.is_file():
            found[NAMES.get(file.name.partition("-")[0].lower(), "")] = file
    return found


def _labels_of(images: Path) -> Path:
    """Where the labels of an IDX file of images stand; the same file where its name does not tell."""
    return images.with_name(images.name.replace("images", "labels").replace("idx3", "idx1"))


def _read_image(path: Path) -> NDArray[np.uint8]:
    image = pillow()
    try:
        with image.open(path) as one:
            if one.mode.startswith("I"):
                # 16 bits
                return as_pixels((np.asarray(one) // 257).astype(np.uint8), str(path))
            grey = one.mode in ("1", "L", "LA")
            return as_pixels(np.asarray(one.convert("L" if grey else "RGB")), str(path))
    except (OSError, SyntaxError, ValueError) as error:
        raise UserError(f"{path}: Pillow cannot read this image ({error})") from error
