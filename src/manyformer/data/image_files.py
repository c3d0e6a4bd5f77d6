"""Image collections in NumPy archives, in IDX files (as MNIST), and in folders of image files."""

import struct
import zipfile
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from manyformer.data.image_reading import (
    SPLIT_NAMES,
    ImageCollection,
    ImagePart,
    ImageRecord,
    as_pixels,
    files_stamp,
    pillow,
)
from manyformer.data.text_files import content_suffix, existing_path, file_stamp, open_bytes
from manyformer.errors import UserError

IMAGE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".pgm", ".ppm", ".pbm", ".tif", ".tiff"})
"""Suffixes of the image files that are read from a folder."""

_IMAGE_NAMES, _LABEL_NAMES = frozenset({"x", "images", "image"}), frozenset({"y", "labels", "label"})
_UBYTE = 8


def open_image_files(path: str) -> ImageCollection:
    """Open the images at `path`: an .npz file, an IDX file, or a folder. Raises UserError for anything else."""
    resolved = existing_path(path)
    if resolved.is_dir():
        idx_files = _idx_files(resolved)
        return (
            IdxImages(resolved, idx_files)
            if idx_files
            else FolderImages(str(resolved), resolved, _image_files(resolved))
        )
    if content_suffix(resolved) == ".npz":
        return NpzImages(resolved)
    if resolved.suffix.lower() in IMAGE_SUFFIXES:
        return FolderImages(str(resolved), resolved.parent, {"": [resolved]})
    if "ubyte" in resolved.name or "idx" in resolved.name:
        return IdxImages(resolved, {"": resolved})
    raise UserError(
        f"{resolved}: images must be a NumPy archive (.npz), an IDX file (such as train-images-idx3-ubyte.gz), "
        "an image file, or a folder of image files or IDX files"
    )


class _ArrayImages(ImageCollection):
    """A collection whose images and labels are arrays that are loaded entirely."""

    def __init__(self, path: Path) -> None:
        self._path, self.name = path, str(path)
        self._cached_arrays: dict[ImagePart, tuple[NDArray[Any], NDArray[Any] | None]] = {}

    def labels(self, part: ImagePart) -> set[str]:
        labels = self._arrays_of(part)[1]
        return set() if labels is None else {str(label) for label in np.unique(labels)}

    def images(self, part: ImagePart) -> Iterator[ImageRecord]:
        images, labels = self._arrays_of(part)
        for index, image in enumerate(images):
            location = f"{self.name}: image {index}" + (f" of {part}" if part else "")
            yield ImageRecord(as_pixels(image, location), None if labels is None else str(labels[index]), location)

    def _arrays_of(self, part: ImagePart) -> tuple[NDArray[Any], NDArray[Any] | None]:
        if part not in self._cached_arrays:
            images, labels = self._load_arrays(part)
            if images.ndim not in (3, 4):
                raise UserError(f"{self.name}: images must be an array of 3 or 4 axes, but this one is {images.shape}")
            if labels is not None and (labels.ndim != 1 or len(labels) != len(images)):
                raise UserError(
                    f"{self.name}: {len(images):,} images need labels of shape ({len(images)},), not {labels.shape}"
                )
            self._cached_arrays[part] = images, labels
        return self._cached_arrays[part]

    def _load_arrays(self, part: ImagePart) -> tuple[NDArray[Any], NDArray[Any] | None]:
        raise NotImplementedError


@final
class NpzImages(_ArrayImages):
    """Images in a NumPy archive with arrays named like `x` and `y`, `train_x`, `x_train`, or `train_images`."""

    def parts(self) -> list[ImagePart]:
        return list(self._image_arrays)

    def stamp(self) -> list[str | int]:
        return file_stamp(self._path)

    @cached_property
    def _file(self) -> Any:
        # numpy.load leaves the file open if it is no archive
        if not zipfile.is_zipfile(self._path):
            raise UserError(f"{self._path}: this is not a complete NumPy archive (.npz)")
        return np.load(self._path)

    @cached_property
    def _image_arrays(self) -> dict[ImagePart, str]:
        image_arrays = self._arrays_named(_IMAGE_NAMES)
        if not image_arrays:
            array_names = ", ".join(self._file.files) or "nothing"
            raise UserError(
                f"{self._path}: there are no images in it; it has {array_names}, but x or train_x is needed"
            )
        return image_arrays

    def _arrays_named(self, keywords: frozenset[str]) -> dict[ImagePart, str]:
        """The arrays whose names contain one of `keywords`, by the split that the remaining name gives."""
        arrays: dict[ImagePart, str] = {}
        for name in self._file.files:
            name_parts = name.lower().split("_")
            split_names = [word for word in name_parts if word not in keywords]
            if len(split_names) < len(name_parts) and all(word in SPLIT_NAMES for word in split_names):
                arrays[SPLIT_NAMES[split_names[0]] if split_names else ""] = name
        return arrays

    def _load_arrays(self, part: ImagePart) -> tuple[NDArray[Any], NDArray[Any] | None]:
        labels = self._arrays_named(_LABEL_NAMES).get(part)
        return self._load_array(self._image_arrays[part]), None if labels is None else self._load_array(labels)

    def _load_array(self, name: str) -> NDArray[Any]:
        try:
            array: NDArray[Any] = self._file[name]
        except (OSError, ValueError, zipfile.BadZipFile, EOFError) as error:
            raise UserError(f"{self._path}: the array {name} cannot be read ({error})") from error
        return array


@final
class IdxImages(_ArrayImages):
    """Images in IDX files (yann.lecun.com/exdb/mnist), plain or gzipped, with labels in files named as in MNIST."""

    def __init__(self, path: Path, images: dict[ImagePart, Path]) -> None:
        super().__init__(path)
        self._image_files = images

    def parts(self) -> list[ImagePart]:
        return list(self._image_files)

    def stamp(self) -> list[str | int]:
        files = [
            file for images in self._image_files.values() for file in (images, _labels_path(images)) if file.is_file()
        ]
        return files_stamp(files[0].parent, files)

    def _load_arrays(self, part: ImagePart) -> tuple[NDArray[Any], NDArray[Any] | None]:
        images = self._image_files[part]
        labels = _labels_path(images)
        return read_idx(images), read_idx(labels) if labels != images and labels.is_file() else None


@final
class FolderImages(ImageCollection):
    """Image files in the folder `root`, in a folder per label, optionally inside folders train, valid and test."""

    def __init__(self, name: str, root: Path, files: dict[ImagePart, list[Path]]) -> None:
        self.name, self._root, self._files = name, root, files

    def parts(self) -> list[ImagePart]:
        return list(self._files)

    def labels(self, part: ImagePart) -> set[str]:
        labels = {self._label_of(file, part) for file in self._files[part]}
        return {label for label in labels if label is not None}

    def images(self, part: ImagePart) -> Iterator[ImageRecord]:
        for file in self._files[part]:
            yield ImageRecord(_read_image(file), self._label_of(file, part), str(file))

    def stamp(self) -> list[str | int]:
        return files_stamp(self._root, [file for files in self._files.values() for file in files])

    def _label_of(self, file: Path, part: ImagePart) -> str | None:
        folders = file.relative_to(self._root).parts[1 if part else 0 : -1]
        return folders[-1] if folders else None


def read_idx(path: Path) -> NDArray[np.uint8]:
    """Read the array of an IDX file of bytes. Raises UserError if the file is not one or is incomplete."""
    with open_bytes(path) as file:
        content = file.read()
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] != _UBYTE:
        prefix = content[:4].hex(" ")
        raise UserError(f"{path}: this is not an IDX file of bytes; it starts with {prefix} instead of 00 00 08")
    ndim = content[3]
    header_size = 4 + 4 * ndim
    if len(content) < header_size:
        raise UserError(f"{path}: this file is incomplete: it ends within its header")
    shape = struct.unpack(f">{ndim}I", content[4:header_size])
    size = int(np.prod(shape, dtype=np.int64))
    if len(content) - header_size != size:
        shape_text = " x ".join(map(str, shape))
        raise UserError(
            f"{path}: this file is incomplete: its header gives {shape_text} bytes, but it has "
            f"{len(content) - header_size:,}"
        )
    return np.frombuffer(content, dtype=np.uint8, offset=header_size).reshape(shape)


def _image_files(folder: Path) -> dict[ImagePart, list[Path]]:
    """The image files under a folder, by the split that its subfolder names. Raises UserError if there are none."""
    files: dict[ImagePart, list[Path]] = {}
    for file in sorted(folder.rglob("*")):
        parts = file.relative_to(folder).parts
        if file.suffix.lower() in IMAGE_SUFFIXES and not any(name.startswith(".") for name in parts):
            part = SPLIT_NAMES.get(parts[0].lower(), "") if len(parts) > 1 else ""
            files.setdefault(part, []).append(file)
    if not files:
        raise UserError(f"{folder}: this folder has no images (searched for {' '.join(sorted(IMAGE_SUFFIXES))})")
    return files


def _idx_files(folder: Path) -> dict[ImagePart, Path]:
    """The IDX image files in a folder, by the split that their names start with."""
    files: dict[ImagePart, Path] = {}
    for file in sorted(folder.iterdir()):
        if "images" in file.name and "idx3" in file.name and file.is_file():
            files[SPLIT_NAMES.get(file.name.partition("-")[0].lower(), "")] = file
    return files


def _labels_path(images: Path) -> Path:
    """The path of the labels of an IDX image file; the same path if the file is not named as in MNIST."""
    return images.with_name(images.name.replace("images", "labels").replace("idx3", "idx1"))


def _read_image(path: Path) -> NDArray[np.uint8]:
    pil = pillow()
    try:
        with pil.open(path) as opened:
            if opened.mode.startswith("I"):
                # 16 bits
                return as_pixels((np.asarray(opened) // 257).astype(np.uint8), str(path))
            is_gray = opened.mode in ("1", "L", "LA")
            return as_pixels(np.asarray(opened.convert("L" if is_gray else "RGB")), str(path))
    except (OSError, SyntaxError, ValueError) as error:
        raise UserError(f"{path}: Pillow cannot read this image ({error})") from error
