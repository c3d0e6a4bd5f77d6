"""Images, from shards to batches: as they are with a label each, or as sequences of levels."""

from typing import final

import numpy as np
import torch
from numpy.typing import NDArray

from manyformer.batches import CausalLMBatch, ImageClassificationBatch
from manyformer.data.length_buckets import SequenceDataset
from manyformer.data.pixel_tokenizer import FIRST, PixelTokenizer
from manyformer.data.ragged import IntArray
from manyformer.data.token_shards import TokenShard


class _Images(SequenceDataset):
    """Images of one shape: all of the same length, which is the number of their values."""

    def __init__(self, images: TokenShard, levels: PixelTokenizer) -> None:
        values = levels.shape.values
        assert images.facts.tokens == images.facts.documents * values
        self._values = np.reshape(images.tokens, (-1, values))
        self._levels = levels
        self.lengths = np.full(images.facts.documents, values)
        self.ties = np.zeros_like(self.lengths)

    def _chosen(self, numbers: IntArray) -> NDArray[np.uint8]:
        return np.asarray(self._values[numbers])


@final
class LabelledImageDataset(_Images):
    """Images in brightness from 0 to 255, whatever the levels they were reduced to, with the number of their class."""

    def __init__(self, images: TokenShard, labels: TokenShard, levels: PixelTokenizer) -> None:
        super().__init__(images, levels)
        assert images.facts.documents == labels.facts.tokens
        self._labels = np.asarray(labels.tokens, dtype=np.int64)
        self.fingerprint = f"{images.facts.sha256[:12]}-{labels.facts.sha256[:12]}"

    def make(self, numbers: IntArray) -> ImageClassificationBatch:
        pixels = self._levels.brightness(self._chosen(numbers)).reshape(len(numbers), *self._levels.shape)
        return ImageClassificationBatch(torch.from_numpy(pixels), torch.from_numpy(self._labels[numbers]))


@final
class PixelSequenceDataset(_Images):
    """Images as BOS + x without its last value, and x as targets, so that every value is predicted once.

    The values x stand in the order that the levels are written in; in their shard they stand row by row.
    """

    def __init__(self, images: TokenShard, levels: PixelTokenizer) -> None:
        super().__init__(images, levels)
        self.fingerprint = f"{images.facts.sha256[:12]}-rows-{levels.block[0]}x{levels.block[1]}"

    def make(self, numbers: IntArray) -> CausalLMBatch:
        targets = torch.from_numpy(self._chosen(numbers)[:, self._levels.order].astype(np.int64) + FIRST)
        begin = torch.full_like(targets[:, :1], self._levels.bos)
        return CausalLMBatch(torch.cat([begin, targets[:, :-1]], dim=1), targets)
