"""Data sets of images that collate shards into batches: images with labels, or sequences of pixel tokens."""

from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from manyformer.batches import CausalLMBatch, ImageClassificationBatch, Seq2SeqBatch
from manyformer.data.length_buckets import SequenceDataset
from manyformer.data.pixel_tokenizer import FIRST_LEVEL_TOKEN, PixelTokenizer
from manyformer.data.token_shards import TokenShard
from manyformer.errors import UserError
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
        return CausalLMBatch(*_value_rows(self._select(indices), self._tokenizer))


@final
class ClassImageDataset(_ImageDataset):
    """Images as `PixelSequenceDataset` has them, with their class id as the source."""

    def __init__(self, images: TokenShard, labels: TokenShard, tokenizer: PixelTokenizer) -> None:
        super().__init__(images, tokenizer)
        assert images.facts.documents == labels.facts.tokens
        self._labels = np.asarray(labels.tokens, dtype=np.int64)
        rows, columns = tokenizer.block
        self.fingerprint = f"{images.facts.sha256[:12]}-{labels.facts.sha256[:12]}-rows-{rows}x{columns}"

    def make_batch(self, indices: IntArray) -> Seq2SeqBatch:
        source = torch.from_numpy(self._labels[indices])[:, None]
        return Seq2SeqBatch(source, *_value_rows(self._select(indices), self._tokenizer))


@final
class SmallImageDataset(_ImageDataset):
    """Images as `PixelSequenceDataset` has them, with the values of the image made smaller as the source.

    Raises UserError where `reduction` does not divide the images."""

    def __init__(self, images: TokenShard, tokenizer: PixelTokenizer, reduction: int) -> None:
        super().__init__(images, tokenizer)
        height, width, _ = tokenizer.shape
        if height % reduction or width % reduction:
            raise UserError(f"images of {height} x {width} cannot become {reduction} times smaller; set data.reduction")
        self.reduction = reduction
        rows, columns = tokenizer.block
        self.fingerprint = f"{images.facts.sha256[:12]}-rows-{rows}x{columns}-small-{reduction}"

    def make_batch(self, indices: IntArray) -> Seq2SeqBatch:
        values = self._select(indices)
        pixels = self._tokenizer.brightness(values).reshape(len(indices), *self._tokenizer.shape)
        source = torch.from_numpy(small_image_tokens(pixels, self.reduction, self._tokenizer))
        return Seq2SeqBatch(source, *_value_rows(values, self._tokenizer))


def reduced_images(pixels: NDArray[np.uint8], reduction: int) -> NDArray[np.uint8]:
    """Images (n, h, w, c) `reduction` times smaller: each pixel is the rounded mean of reduction x reduction pixels."""
    count, height, width, channels = pixels.shape
    cells = pixels.reshape(count, height // reduction, reduction, width // reduction, reduction, channels)
    small: NDArray[np.uint8] = np.rint(cells.mean((2, 4))).astype(np.uint8)
    return small


def small_image_tokens(pixels: NDArray[np.uint8], reduction: int, tokenizer: PixelTokenizer) -> NDArray[np.int64]:
    """The tokens (n, s) of images in brightness, made `reduction` times smaller, row by row."""
    small = tokenizer.quantize(reduced_images(pixels, reduction))
    return small.reshape(len(pixels), -1).astype(np.int64) + FIRST_LEVEL_TOKEN


def _value_rows(values: NDArray[np.uint8], tokenizer: PixelTokenizer) -> tuple[Tensor, Tensor]:
    """BOS + x without its last token, and x, for the values x of each image in the tokenizer's order."""
    targets = torch.from_numpy(values[:, tokenizer.order].astype(np.int64) + FIRST_LEVEL_TOKEN)
    bos = torch.full_like(targets[:, :1], tokenizer.bos)
    return torch.cat([bos, targets[:, :-1]], dim=1), targets
