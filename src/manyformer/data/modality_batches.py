"""Batches of examples of several parts: captions of images, labelled examples, and pairs to contrast."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import NamedTuple, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from manyformer.batches import IGNORE_INDEX, Batch, ModalitiesBatch, Seq2SeqBatch
from manyformer.core import PADDING_SEGMENT
from manyformer.data.array_checks import NO_LABEL
from manyformer.data.audio_reading import INT16_SCALE
from manyformer.data.epochs import Epoch, EpochPlan, random_generator
from manyformer.data.log_mel import LogMelFrontEnd
from manyformer.data.modality_archive import NO_PART, ModalityArrays, RecordingArrays
from manyformer.data.padded_examples import EncodedTexts
from manyformer.data.row_layouts import pad_ragged
from manyformer.errors import UserError
from manyformer.type_aliases import IntArray

# Distinguishes the random stream of missing parts from that of the order.
_DROPOUT_SEED = 21_07_00135


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
        """Those of the examples that have what a batch needs."""

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
        return Seq2SeqBatch(source, target, targets, None, segments)


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
        random = random_generator(*self._seeds, number, _DROPOUT_SEED)
        present = self._reader._present(examples)
        kept = np.where(present, random.random(present.shape), -1).argmax(0)
        missing = random.random(present.shape) < self._part_dropout
        missing[kept, np.arange(len(examples))] = False
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
