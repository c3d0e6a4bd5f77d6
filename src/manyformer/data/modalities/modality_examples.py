"""Examples of several parts: read from NumPy archives, every array compared with the others, and made batches.

Batches are captions of images, labelled examples, or pairs to contrast."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from manyformer.base.errors import UserError
from manyformer.base.type_aliases import IntArray, LogFn
from manyformer.config.data_sections.untokenized_sections import MAX_RATE, MIN_RATE
from manyformer.data.audio.audio_reading import INT16_SCALE, decode_mu_law
from manyformer.data.audio.log_mel import LogMelFrontEnd
from manyformer.data.batching.epochs import Epoch, EpochPlan, random_generator
from manyformer.data.batching.length_buckets import EncodedTexts
from manyformer.data.batching.row_layouts import pad_ragged
from manyformer.data.storage.array_archives import (
    NO_LABEL,
    SPLIT_NAMES,
    check_labels,
    describe_array,
    read_arrays,
    read_splits,
    whole_numbers,
)
from manyformer.nn.batches import IGNORE_INDEX, Batch, ModalitiesBatch, Seq2SeqBatch
from manyformer.nn.core import PADDING_SEGMENT

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
# Distinguishes the random stream of missing parts from that of the order.
_DROPOUT_SEED = 21_07_00135


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
    """The examples in a NumPy archive; a line in the log names arrays that are not read.

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
    return ModalityArrays(
        images=images,
        recordings=recordings,
        texts=texts,
        part_index=part_index,
        labels=labels,
        label_names=label_names,
        splits=read_splits(arrays, labels, name),
    )


def _check_images(images: NDArray[Any], name: str) -> NDArray[np.uint8]:
    if images.dtype != np.uint8 or images.ndim not in (3, 4) or 0 in images.shape:
        raise UserError(f"{name}: images must be bytes (n, h, w) or (n, h, w, c), and is {describe_array(images)}")
    # gray images get an axis of channels
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
        # one form of samples from here on
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


@final
class FrontEndRecordings:
    """Recordings whose features a front end computes."""

    def __init__(self, recordings: RecordingArrays, front_end: LogMelFrontEnd) -> None:
        self._recordings = recordings
        self.front_end = front_end
        self._starts = recordings.lengths.cumsum() - recordings.lengths
        self.frame_counts = front_end.settings.frame_counts(recordings.lengths)

    def features(self, index: IntArray) -> tuple[Tensor, IntArray]:
        """The padded features of recordings (b, f, m), and their numbers of frames; recording -1 has none."""
        exists = index != NO_PART
        lengths = self._recordings.lengths[index] * exists
        # a batch without any recording still needs a column for the transform
        levels = pad_ragged(
            self._recordings.samples, self._starts[index] * exists, lengths, width=max(1, int(lengths.max())), fill=0
        )
        waves = torch.from_numpy(levels.astype(np.float32) / np.float32(INT16_SCALE))
        counts: IntArray = self.frame_counts[index] * exists
        return self.front_end.features(waves, lengths), counts


class ExampleSet(NamedTuple):
    """The examples of an archive, with the tokens of texts, the recordings, and the parts read, in this order."""

    arrays: ModalityArrays
    texts: EncodedTexts | None
    recordings: FrontEndRecordings | None
    parts: tuple[str, ...]

    def lengths(self, examples: IntArray) -> IntArray:
        """The values of an image, the frames, and the tokens of a text, with start and end token, of each example."""
        total = np.zeros(len(examples), dtype=np.int64)
        for part in self.parts:
            index = self.arrays.part_index[part][examples]
            total += np.where(index == NO_PART, 0, self._part_lengths(part, index))
        return total

    def _part_lengths(self, part: str, index: IntArray) -> IntArray | int:
        if part == "image":
            assert self.arrays.images is not None
            return int(np.prod(self.arrays.images.shape[1:]))
        if part == "sound":
            assert self.recordings is not None
            frames: IntArray = self.recordings.frame_counts[index]
            return frames
        assert self.texts is not None
        lengths: IntArray = self.texts.lengths[index] + 2
        return lengths


class ExampleReader(ABC):
    """Makes batches of examples; `examples` are those that have what the batches need."""

    def __init__(self, data: ExampleSet) -> None:
        self.data = data

    @abstractmethod
    def usable(self, examples: IntArray) -> IntArray:
        """The examples that have all that a batch needs."""

    @abstractmethod
    def batch(self, examples: IntArray, missing: Mapping[str, NDArray[np.bool_]]) -> Batch:
        """The batch of these examples without the `missing` parts."""

    def _present(self, examples: IntArray) -> NDArray[np.bool_]:
        """Whether each example has each of the parts that are read (parts, examples)."""
        return np.stack([self.data.arrays.part_index[part][examples] != NO_PART for part in self.data.parts])


@final
class CaptionReader(ExampleReader):
    """Images as sources, their texts as targets."""

    def usable(self, examples: IntArray) -> IntArray:
        return examples[self._present(examples).all(0)]

    def batch(self, examples: IntArray, missing: Mapping[str, NDArray[np.bool_]]) -> Seq2SeqBatch:
        arrays = self.data.arrays
        texts = self.data.texts
        assert arrays.images is not None
        assert texts is not None
        source = torch.from_numpy(arrays.images[arrays.part_index["image"][examples]])
        target, targets, segments = texts.targets(arrays.part_index["text"][examples])
        return Seq2SeqBatch(source, target, targets, target_segments=segments)


class PartsReader(ExampleReader):
    """Examples with the parts that are read."""

    def batch(self, examples: IntArray, missing: Mapping[str, NDArray[np.bool_]]) -> ModalitiesBatch:
        labels = self.data.arrays.labels[examples]
        batch = ModalitiesBatch(torch.from_numpy(np.where(labels == NO_LABEL, IGNORE_INDEX, labels)))
        index = {
            part: np.where(missing.get(part, False), NO_PART, self.data.arrays.part_index[part][examples])
            for part in self.data.parts
        }
        if "image" in index:
            batch = self._with_images(batch, index["image"])
        if "sound" in index:
            batch = self._with_frames(batch, index["sound"])
        if "text" in index:
            return self._with_texts(batch, index["text"])
        return batch

    def _with_images(self, batch: ModalitiesBatch, index: IntArray) -> ModalitiesBatch:
        images = self.data.arrays.images
        assert images is not None
        # a copy, since it is indexed by an array: index -1 reads the last image, which is blanked below
        pixels = images[index]
        pixels[index == NO_PART] = 0
        return batch._replace(images=torch.from_numpy(pixels), image_segments=_segments(index != NO_PART))

    def _with_frames(self, batch: ModalitiesBatch, index: IntArray) -> ModalitiesBatch:
        assert self.data.recordings is not None
        features, counts = self.data.recordings.features(index)
        is_frame = np.arange(features.shape[1]) < counts[:, None]
        # a recording without samples still has a frame
        frames = features.masked_fill(torch.from_numpy(~is_frame)[..., None], 0)
        return batch._replace(frames=frames, frame_segments=_segments(is_frame))

    def _with_texts(self, batch: ModalitiesBatch, index: IntArray) -> ModalitiesBatch:
        texts = self.data.texts
        assert texts is not None
        tokens, lengths = texts.rows(index)
        # a column in front for the start token, and one behind for the end token of the longest text
        rows = np.pad(tokens, ((0, 0), (1, 1)))
        rows[:, 0] = texts.tokenizer.bos
        columns = np.arange(rows.shape[1])
        rows[columns == lengths[:, None] + 1] = texts.tokenizer.eos
        is_token = (columns <= lengths[:, None] + 1) & (index != NO_PART)[:, None]
        return batch._replace(
            tokens=torch.from_numpy(np.where(is_token, rows, texts.tokenizer.pad)), token_segments=_segments(is_token)
        )


@final
class LabelReader(PartsReader):
    """Labelled examples that have one of the parts at least."""

    def usable(self, examples: IntArray) -> IntArray:
        is_usable = self._present(examples).any(0) & (self.data.arrays.labels[examples] != NO_LABEL)
        usable: IntArray = examples[is_usable]
        return usable


@final
class ContrastReader(PartsReader):
    """Examples that have all parts, which are two."""

    def usable(self, examples: IntArray) -> IntArray:
        return examples[self._present(examples).all(0)]

    def batch(self, examples: IntArray, missing: Mapping[str, NDArray[np.bool_]]) -> ModalitiesBatch:
        batch = super().batch(examples, missing)
        # every row is compared: those without a label have a class of their own
        unlabelled = len(self.data.arrays.label_names)
        return batch._replace(labels=torch.where(batch.labels == IGNORE_INDEX, unlabelled, batch.labels))


@final
class ExampleEpoch(Epoch):
    """Batches of so many `rows` in the order given; each part is missing with probability `part_dropout`."""

    def __init__(
        self, reader: ExampleReader, order: IntArray, rows: int, part_dropout: float = 0.0, seeds: tuple[int, ...] = ()
    ) -> None:
        self._reader = reader
        self._order = order
        self._rows = rows
        self._part_dropout = part_dropout
        self._seeds = seeds

    def __len__(self) -> int:
        return -(-len(self._order) // self._rows)

    def batch(self, number: int) -> Batch:
        examples = self._order[number * self._rows : (number + 1) * self._rows]
        return self._reader.batch(examples, self._missing(examples, number) if self._part_dropout else {})

    def _missing(self, examples: IntArray, number: int) -> dict[str, NDArray[np.bool_]]:
        """Draw the parts that are missing; of each example one of its parts, drawn at random, stays."""
        # seeded by the batch, so that a run that is resumed drops the same parts
        random = random_generator(*self._seeds, number, _DROPOUT_SEED)
        present = self._reader._present(examples)
        present_part = np.where(present, random.random(present.shape), -1).argmax(0)
        missing = random.random(present.shape) < self._part_dropout
        # an example without any part would have nothing to read
        missing[present_part, np.arange(len(examples))] = False
        return dict(zip(self._reader.data.parts, missing, strict=True))


@final
class ExamplePlan(EpochPlan):
    """Epochs of shuffled examples, as many in a batch as `batch_tokens` allow with the longest of them.

    Raises UserError if not even one fits."""

    def __init__(
        self, reader: ExampleReader, examples: IntArray, batch_tokens: int, part_dropout: float, fingerprint: str
    ) -> None:
        self._reader = reader
        self._examples = examples
        self._part_dropout = part_dropout
        self._rows = rows_of_batch(reader, examples, batch_tokens)
        self.fingerprint = f"{fingerprint}-{len(examples)}-{self._rows}-{part_dropout}"

    def epoch(self, seed: int, number: int) -> ExampleEpoch:
        order = random_generator(seed, number).permutation(self._examples)
        return ExampleEpoch(self._reader, order, self._rows, self._part_dropout, (seed, number))


def rows_of_batch(reader: ExampleReader, examples: IntArray, batch_tokens: int) -> int:
    """The number of rows of which each is as long as the longest of these examples. Raises UserError for none."""
    longest = int(reader.data.lengths(examples).max())
    if longest > batch_tokens:
        raise UserError(
            f"batch.tokens is {batch_tokens:,}, less than the {longest:,} values and tokens of the longest example; "
            f"64 examples are batch.tokens={64 * longest}"
        )
    return batch_tokens // longest


def _segments(is_valid: NDArray[np.bool_]) -> Tensor:
    return torch.from_numpy(np.where(is_valid, 0, PADDING_SEGMENT))
