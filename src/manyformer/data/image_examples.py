"""Data sets of images that collate shards into batches: images with labels, or sequences of pixel tokens."""

from typing import final

import numpy as np
import torch
from numpy.typing import NDArray

from manyformer.batches import CausalLMBatch, ImageClassificationBatch
from manyformer.data.length_buckets import SequenceDataset
from manyformer.data.pixel_tokenizer import FIRST_LEVEL_TOKEN, PixelTokenizer
from manyformer.data.token_shards import TokenShard
from manyformer.type_aliases import IntArray


class _ImageDataset(SequenceDataset):
    """Images of one shape; the length of each is its number of values."""

    def __init__(self, images: TokenShard, tokenizer: PixelTokenizer) -> None:
        values = tokenizer.shape.values
        assert images.facts.tokens == images.facts.documents * values
        self._values = np.reshape(images.tokens, (-1, values))
        self._tokenizer = tokenizer
        self.lengths = np.full(images.facts.documents, values)
        self.tie_breakers = np.zeros_like(self.lengths)

    def _select(self, indices: IntArray) -> NDArray[np.uint8]:
        return np.asarray(self._values[indices])


@final
class LabelledImageDataset(_ImageDataset):
    """Images in brightness from 0 to 255 (quantized to the tokenizer's levels), with their class ids."""

    def __init__(self, images: TokenShard, labels: TokenShard, tokenizer: PixelTokenizer) -> None:
        super().__init__(images, tokenizer)
        assert images.facts.documents == labels.facts.tokens
        self._labels = np.asarray(labels.tokens, dtype=np.int64)
        self.fingerprint = f"{images.facts.sha256[:12]}-{labels.facts.sha256[:12]}"

    def make_batch(self, indices: IntArray) -> ImageClassificationBatch:
        pixels = self._tokenizer.brightness(self._select(indices)).reshape(len(indices), *self._tokenizer.shape)
        return ImageClassificationBatch(torch.from_numpy(pixels), torch.from_numpy(self._labels[indices]))


@final
class PixelSequenceDataset(_ImageDataset):
    """Images as BOS + x without its last token, with x as targets, so that every value is predicted once.

    The tokens x are in the tokenizer's order; the shard holds the values in raster order.
    """

    def __init__(self, images: TokenShard, tokenizer: PixelTokenizer) -> None:
        super().__init__(images, tokenizer)
        self.fingerprint = f"{images.facts.sha256[:12]}-rows-{tokenizer.block[0]}x{tokenizer.block[1]}"

    def make_batch(self, indices: IntArray) -> CausalLMBatch:
        targets = torch.from_numpy(self._select(indices)[:, self._tokenizer.order].astype(np.int64) + FIRST_LEVEL_TOKEN)
        bos = torch.full_like(targets[:, :1], self._tokenizer.bos)
        return CausalLMBatch(torch.cat([bos, targets[:, :-1]], dim=1), targets)
