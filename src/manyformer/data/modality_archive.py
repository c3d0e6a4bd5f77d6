"""Examples of several parts in NumPy archives: every array is compared with the others when it is read."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from manyformer.config.data_sections.untokenized_sections import MAX_RATE, MIN_RATE
from manyformer.data.array_archives import read_arrays
from manyformer.data.array_checks import (
    SPLIT_NAMES,
    check_labels,
    describe_array,
    read_splits,
    whole_numbers,
)
from manyformer.data.audio_reading import INT16_SCALE, decode_mu_law
from manyformer.errors import UserError
from manyformer.type_aliases import LogFn

NO_PART = -1
"""The index of a part that an example does not have."""
PARTS = ("image", "sound", "text")
"""The kinds of parts, in the order in which they are read."""
ARRAYS = (
    *("images", "samples", "lengths", "sample_rate", "texts"),
    *(f"{part}_index" for part in PARTS),
    *("labels", "label_names", *SPLIT_NAMES),
)
MAX_TEXT = 1 << 20
"""The most characters of a text."""


class RecordingArrays(NamedTuple):
    """Recordings one after another in `samples` (16-bit numbers), each as long as `lengths` says, `rate` a second."""

    samples: NDArray[np.int16]
    lengths: NDArray[np.int64]
    rate: int


class ModalityArrays(NamedTuple):
    """The parts of all examples, and which of them each example has.

    `part_index` has an array of numbers of images, recordings or texts for each kind of part, -1 for none. `labels` are
    classes, -1 for none, and `splits` are numbers of examples."""

    images: NDArray[np.uint8] | None
    recordings: RecordingArrays | None
    texts: NDArray[np.str_] | None
    part_index: Mapping[str, NDArray[np.int64]]
    labels: NDArray[np.int64]
    label_names: tuple[str, ...]
    splits: Mapping[str, NDArray[np.int64]]

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """The arrays of an archive that is read as these examples."""
        arrays: dict[str, NDArray[Any]] = {f"{part}_index": index for part, index in self.part_index.items()}
        arrays |= {name: array for name, array in (("images", self.images), ("texts", self.texts)) if array is not None}
        if self.recordings is not None:
            samples, lengths, rate = self.recordings
            arrays |= {"samples": samples, "lengths": lengths, "sample_rate": np.array(rate)}
        if self.label_names:
            arrays |= {"labels": self.labels, "label_names": np.array(self.label_names)}
        return arrays | dict(self.splits)


def read_modality_archive(path: Path, log: LogFn | None = None) -> ModalityArrays:
    """The examples in a NumPy archive; the log is told of arrays that are not read.

    Raises UserError for a defect, with the number of the example from 0 on."""
    return check_modalities(read_arrays(path, ARRAYS, log), str(path))


def check_modalities(arrays: Mapping[str, NDArray[Any]], name: str) -> ModalityArrays:
    """Examples from arrays of a file called `name`. Raises UserError."""
    images = None
    if "images" in arrays:
        images = _check_images(arrays["images"], name)
    texts = None
    if "texts" in arrays:
        texts = _check_texts(arrays["texts"], name)
    recordings = None
    if "samples" in arrays:
        recordings = _check_recordings(arrays, name)
    parts = {"image": images, "sound": None if recordings is None else recordings.lengths, "text": texts}
    counts = {part: len(array) for part, array in parts.items() if array is not None}
    if not counts or len(counts) + ("labels" in arrays) < 2:
        raise UserError(
            f"{name}: examples have two at least of images, samples, texts and labels; the arrays are {list(arrays)}"
        )
    part_index = {part: _read_index(arrays, part, count, name) for part, count in counts.items()}
    examples = len(next(iter(part_index.values())))
    labels = np.zeros(examples, dtype=np.int64)
    label_names = tuple[str, ...]()
    if "labels" in arrays:
        labels = whole_numbers(arrays, "labels", (None,), name)
        label_names = check_labels(labels, arrays, name)
    for key, array in {**{f"{part}_index": index for part, index in part_index.items()}, "labels": labels}.items():
        if len(array) != examples:
            first = next(iter(part_index))
            raise UserError(f"{name}: {key} are for {len(array):,} examples, and {first}_index for {examples:,}")
    _check_presence(part_index, name)
    return ModalityArrays(images, recordings, texts, part_index, labels, label_names, read_splits(arrays, labels, name))


def _check_images(images: NDArray[Any], name: str) -> NDArray[np.uint8]:
    if images.dtype != np.uint8 or images.ndim not in (3, 4) or 0 in images.shape:
        raise UserError(f"{name}: images must be bytes (n, h, w) or (n, h, w, c), and is {describe_array(images)}")
    images = images if images.ndim == 4 else images[..., None]
    if images.shape[3] not in (1, 3):
        raise UserError(f"{name}: images must have 1 or 3 channels, and have {images.shape[3]}")
    return images


def _check_recordings(arrays: Mapping[str, NDArray[Any]], name: str) -> RecordingArrays:
    for key in ("lengths", "sample_rate"):
        if key not in arrays:
            raise UserError(f"{name}: samples of recordings need an array {key} beside them")
    samples = arrays["samples"]
    lengths = whole_numbers(arrays, "lengths", (None,), name)
    if samples.ndim != 1 or samples.dtype not in (np.uint8, np.int16):
        raise UserError(
            f"{name}: samples must be mu-law codes (uint8) or 16-bit integers, and is {describe_array(samples)}"
        )
    if not len(lengths) or (lengths < 1).any() or lengths.sum() != len(samples):
        raise UserError(
            f"{name}: lengths must be 1 or more and sum to the {len(samples):,} samples, and sum to {lengths.sum():,}"
        )
    rate = whole_numbers(arrays, "sample_rate", (), name)
    if not MIN_RATE <= rate <= MAX_RATE:
        raise UserError(f"{name}: sample_rate is {rate}, and must be {MIN_RATE:,} to {MAX_RATE:,} samples a second")
    if samples.dtype == np.uint8:
        samples = np.round(decode_mu_law(samples) * (INT16_SCALE - 1)).astype(np.int16)
    return RecordingArrays(samples, lengths, int(rate))


def _check_texts(texts: NDArray[Any], name: str) -> NDArray[np.str_]:
    if texts.dtype.kind != "U" or texts.ndim != 1 or not len(texts):
        raise UserError(f"{name}: texts must be an array of texts of one axis, and is {describe_array(texts)}")
    lengths = np.strings.str_len(texts)
    if not lengths.all():
        raise UserError(f"{name}: text {int(lengths.argmin())} is empty")
    if lengths.max() > MAX_TEXT:
        raise UserError(f"{name}: text {int(lengths.argmax())} has {lengths.max():,} characters, at most {MAX_TEXT:,}")
    return texts


def _read_index(arrays: Mapping[str, NDArray[Any]], part: str, count: int, name: str) -> NDArray[np.int64]:
    """The number of the part of each example; without an array of numbers, example i has part i."""
    key = f"{part}_index"
    if key not in arrays:
        return np.arange(count)
    index = whole_numbers(arrays, key, (None,), name)
    for example in np.flatnonzero((index < NO_PART) | (index >= count))[:1]:
        raise UserError(
            f"{name}: {key} of example {example} is {index[example]}, and must be 0 to {count - 1}, or -1 for none"
        )
    return index


def _check_presence(part_index: Mapping[str, NDArray[np.int64]], name: str) -> None:
    missing = np.all([index == NO_PART for index in part_index.values()], axis=0)
    if missing.any():
        raise UserError(f"{name}: example {int(missing.argmax())} has no part, neither {' nor '.join(part_index)}")
