"""Images in NumPy archives, in IDX files (as MNIST), and in folders of image files."""

import math
import struct
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property, partial
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from manyformer.base.errors import UserError, list_names
from manyformer.data.images.image_reading import (
    SPLIT_NAMES,
    ImagePart,
    ImageRecord,
    ImageSource,
    as_pixels,
    decode_image,
)
from manyformer.data.storage.array_archives import array_members, check_array_size, describe_unread, read_array
from manyformer.data.text.text_files import (
    content_suffix,
    existing_path,
    file_stamp,
    files_stamp,
    open_bytes,
    selected_files,
)

IMAGE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".pgm", ".ppm", ".pbm", ".tif", ".tiff"})
"""Suffixes of the image files that are read from a folder."""

_IMAGE_NAMES = frozenset({"x", "images", "image"})
_LABEL_NAMES = frozenset({"y", "labels", "label"})
_UBYTE = 8
_MAX_IDX_AXES = 4

ImageArrays = tuple[NDArray[Any], NDArray[Any] | None]
"""Images (n, h, w) or (n, h, w, c), and their labels or None."""


def open_image_files(path: str) -> dict[ImagePart, ImageSource]:
    """The parts of the images at `path`: an .npz file, an IDX file, an image file or a folder.

    Raises UserError for anything else.
    """
    resolved = existing_path(path)
    if resolved.is_dir():
        idx_files = _idx_files(resolved)
        # IDX files of a folder go before image files beside them
        if idx_files:
            return _idx_images(resolved, idx_files)
        return _folder_images(resolved)
    if content_suffix(resolved) == ".npz":
        return _npz_images(resolved)
    if resolved.suffix.lower() in IMAGE_SUFFIXES:
        stamp = files_stamp(resolved.parent, [resolved])
        return {"": FolderImages(str(resolved), resolved.parent, [resolved], stamp)}
    if "ubyte" in resolved.name or "idx" in resolved.name:
        return _idx_images(resolved, {"": resolved})
    raise UserError(
        f"{resolved}: images must be a NumPy archive (.npz), an IDX file (such as train-images-idx3-ubyte.gz), "
        "an image file, or a folder of image files or IDX files"
    )


@final
class ArrayImages(ImageSource):
    """Images and labels in arrays, which `load` returns when they are first read."""

    def __init__(
        self,
        path: Path,
        part: ImagePart,
        load: Callable[[], ImageArrays],
        stamp: list[str | int],
        notes: tuple[str, ...] = (),
    ) -> None:
        super().__init__(str(path), part, stamp)
        self._load = load
        self.notes = notes

    @cached_property
    def _arrays(self) -> ImageArrays:
        images, labels = self._load()
        # checked when they are read first: opening an archive must not unpack its images
        if images.ndim not in (3, 4):
            raise UserError(f"{self.name}: images must be an array of 3 or 4 axes, but this one is {images.shape}")
        if labels is not None and (labels.ndim != 1 or len(labels) != len(images)):
            shape = f"({len(images)},), not {labels.shape}"
            raise UserError(f"{self.name}: {len(images):,} images need labels of shape {shape}")
        return images, labels

    def labels(self) -> set[str]:
        labels = self._arrays[1]
        if labels is None:
            return set()
        return {str(label) for label in np.unique(labels)}

    def images(self) -> Iterator[ImageRecord]:
        images, labels = self._arrays
        # each image is a view of the array, so that no second copy of all images is made
        for index, image in enumerate(images):
            location = f"{self.name}: image {index}" + (f" of {self.part}" if self.part else "")
            yield ImageRecord(as_pixels(image, location), None if labels is None else str(labels[index]), location)


@final
class FolderImages(ImageSource):
    """Image files in the folder `root`, whose labels are the names of the innermost folders below it."""

    def __init__(self, name: str, root: Path, files: list[Path], stamp: list[str | int], part: ImagePart = "") -> None:
        super().__init__(name, part, stamp)
        self._root = root
        self._files = files
        self.notes = tuple(self._shared_labels())

    def labels(self) -> set[str]:
        return {label for file in self._files if (label := self._label_of(file)) is not None}

    def images(self) -> Iterator[ImageRecord]:
        for file in self._files:
            pixels, changes = decode_image(file)
            yield ImageRecord(as_pixels(pixels, str(file)), self._label_of(file), str(file), changes)

    def _label_of(self, file: Path) -> str | None:
        folders = self._folders_of(file)
        if folders:
            return folders[-1]
        return None

    def _folders_of(self, file: Path) -> tuple[str, ...]:
        """The folders that a file is in below the root, without that of its split."""
        return file.relative_to(self._root).parts[1 if self.part else 0 : -1]

    def _shared_labels(self) -> Iterator[str]:
        """A line for each label that several folders have: their images are of one class."""
        folders: dict[str, set[str]] = {}
        for file in self._files:
            if parts := self._folders_of(file):
                folders.setdefault(parts[-1], set()).add("/".join(parts))
        for label, paths in folders.items():
            if len(paths) > 1:
                shown = sorted(paths)
                ellipsis = ", ..." if len(paths) > 3 else ""
                yield f"label {label!r}: one class of {len(paths):,} folders ({', '.join(shown[:3])}{ellipsis})"


def _npz_images(path: Path) -> dict[ImagePart, ImageSource]:
    """Images in a NumPy archive with arrays named like `x` and `y`, `train_x`, `x_train`, or `train_images`."""
    members = array_members(path)
    images, labels = (_names_by_part(path, members, keywords) for keywords in (_IMAGE_NAMES, _LABEL_NAMES))
    if not images:
        array_names = list_names(members) or "nothing"
        raise UserError(f"{path}: there are no images in it; it has {array_names}, but x or train_x is needed")

    def load_array(name: str) -> NDArray[Any]:
        return read_array(path, members[name])

    def load_part(part: ImagePart) -> ImageArrays:
        return load_array(images[part]), load_array(labels[part]) if part in labels else None

    unread = describe_unread(path, [name for name in members if name not in {*images.values(), *labels.values()}], ())
    notes = () if unread is None else (unread,)
    return {part: ArrayImages(path, part, partial(load_part, part), file_stamp(path), notes) for part in images}


def _names_by_part(path: Path, names: Iterable[str], keywords: frozenset[str]) -> dict[ImagePart, str]:
    """The array names that contain one of `keywords`, by the split that the remaining name gives.

    Raises UserError if there are two for a split."""
    by_part: dict[ImagePart, str] = {}
    for name in names:
        # x_train, train_x and train_images are all in use
        name_parts = name.lower().split("_")
        split_names = [word for word in name_parts if word not in keywords]
        if (
            len(split_names) < len(name_parts)
            and len(split_names) < 2
            and all(word in SPLIT_NAMES for word in split_names)
        ):
            part = SPLIT_NAMES[split_names[0]] if split_names else ""
            if part in by_part:
                raise UserError(f"{path}: the arrays {by_part[part]} and {name} are of one split; leave one out")
            by_part[part] = name
    return by_part


def _idx_images(path: Path, files: dict[ImagePart, Path]) -> dict[ImagePart, ImageSource]:
    """Images in IDX files (yann.lecun.com/exdb/mnist), plain or gzipped, with labels in files named as in MNIST."""
    all_files = [file for images in files.values() for file in (images, _labels_path(images)) if file.is_file()]
    stamp = files_stamp(all_files[0].parent, all_files)

    def load_part(images: Path) -> ImageArrays:
        labels = _labels_path(images)
        return read_idx(images), read_idx(labels) if labels != images and labels.is_file() else None

    return {part: ArrayImages(path, part, partial(load_part, images), stamp) for part, images in files.items()}


def _folder_images(folder: Path) -> dict[ImagePart, ImageSource]:
    """The image files in a folder, optionally inside folders train, valid and test."""
    files: dict[ImagePart, list[Path]] = {}
    for file in folder_image_files(folder):
        parts = file.relative_to(folder).parts
        part = ""
        if len(parts) > 1:
            part = SPLIT_NAMES.get(parts[0].lower(), "")
        files.setdefault(part, []).append(file)
    if not files:
        raise UserError(f"{folder}: this folder has no images (searched for {' '.join(sorted(IMAGE_SUFFIXES))})")
    stamp = files_stamp(folder, [file for part_files in files.values() for file in part_files])
    sources: dict[ImagePart, ImageSource] = {
        part: FolderImages(str(folder), folder, files[part], stamp, part) for part in files
    }
    if len(files) > 1 and "" in files:
        # a split is read from the folder of its name; what is in no such folder belongs to none
        outside = files[""]
        splits = ", ".join(part for part in files if part)
        note = (
            f"{folder}: {len(outside):,} images outside the folders of splits ({splits}) are read for splits without a "
            f"folder alone, the first {outside[0]}"
        )
        for source in sources.values():
            source.notes = (*source.notes, note)
    return sources


def folder_image_files(folder: Path) -> list[Path]:
    """The files of images, and of their labels, that are read from a folder."""
    if idx_files := _idx_files(folder).values():
        return [
            file for images in idx_files for file in dict.fromkeys([images, _labels_path(images)]) if file.is_file()
        ]
    return selected_files(folder, lambda file: file.suffix.lower() in IMAGE_SUFFIXES)


def read_idx(path: Path) -> NDArray[np.uint8]:
    """Read the array of an IDX file of bytes. Raises UserError if the file is not one or is incomplete."""
    with open_bytes(path) as file:
        prefix = file.read(4)
        if len(prefix) < 4 or prefix[:2] != b"\0\0" or prefix[2] != _UBYTE:
            start = prefix.hex(" ")
            raise UserError(f"{path}: this is not an IDX file of bytes; it starts with {start} instead of 00 00 08")
        ndim = prefix[3]
        if ndim > _MAX_IDX_AXES:
            raise UserError(f"{path}: its header gives {ndim} axes, but images have 3 and labels have 1")
        header = file.read(4 * ndim)
        if len(header) < 4 * ndim:
            raise UserError(f"{path}: this file is incomplete: it ends within its header")
        # big-endian, as the format says, whatever the machine
        shape = struct.unpack(f">{ndim}I", header)
        size = math.prod(shape)
        check_array_size(path, size, "its array")
        # a file of any length may be behind a few gzipped bytes
        content = file.read(size + 1)
    if len(content) != size:
        problem, actual = ("incomplete", f"{len(content):,}") if len(content) < size else ("damaged", "more")
        shape_text = " x ".join(map(str, shape))
        raise UserError(f"{path}: this file is {problem}: its header gives {shape_text} bytes, but it has {actual}")
    return np.frombuffer(content, dtype=np.uint8).reshape(shape)


def _idx_files(folder: Path) -> dict[ImagePart, Path]:
    """The IDX image files in a folder, by the split that their names start with."""
    files: dict[ImagePart, Path] = {}
    for file in sorted(folder.iterdir()):
        if "images" in file.name and "idx3" in file.name and file.is_file():
            # train-images-idx3-ubyte and t10k-images-idx3-ubyte of MNIST
            files[SPLIT_NAMES.get(file.name.partition("-")[0].lower(), "")] = file
    return files


def _labels_path(images: Path) -> Path:
    """The path of the labels of an IDX image file; the same path if the file is not named as in MNIST."""
    return images.with_name(images.name.replace("images", "labels").replace("idx3", "idx1"))
