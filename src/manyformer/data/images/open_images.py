"""Opening images: split, resized and written to shards once, then read as batches of images or of pixel tokens."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from manyformer.base.errors import UserError
from manyformer.base.type_aliases import IntArray
from manyformer.config import ImagesData
from manyformer.data.batching.length_buckets import LengthBuckets, SequenceDataset, batches_in_order, check_fills_batch
from manyformer.data.images.image_files import folder_image_files, open_image_files
from manyformer.data.images.image_reading import (
    CHANGES,
    ImagePart,
    ImageRecord,
    ImageResize,
    ImageSource,
    check_same_shape,
    count_changes,
    pillow,
    sort_labels,
)
from manyformer.data.pipeline.file_pipeline import FilePipeline
from manyformer.data.pipeline.kind import OpenRequest, register
from manyformer.data.pipeline.opened import (
    EvaluationPath,
    LengthLimit,
    OpenedData,
    UnlabelledData,
    UnlabelledInput,
    path_name,
)
from manyformer.data.pipeline.splits import PathOrPaths, Splits, path_list
from manyformer.data.pipeline.summary import (
    ChangeCounts,
    DataSummary,
    ExampleFacts,
    LengthSummary,
    change_findings,
    folders_of,
    shown_place,
)
from manyformer.data.storage.cache_folder import PreparationResult, PreparedData
from manyformer.data.storage.token_shards import ShardWriter, TokenShard, open_shard, write_shards
from manyformer.data.text.text_files import describe_folder
from manyformer.data.tokenizers.pixel_tokenizer import FIRST_LEVEL_TOKEN, ImageShape, PixelTokenizer
from manyformer.data.tokenizers.saved_tokenizers import TokenizerPair, class_id
from manyformer.nn.batches import CausalLMBatch, ImageClassificationBatch, Seq2SeqBatch, TextUnits

IMAGES_PER_BATCH = 64
"""Images whose labels are predicted together."""


class _ImageDataset(SequenceDataset):
    """Images of one shape; the length of each is its number of values."""

    def __init__(self, images: TokenShard, tokenizer: PixelTokenizer) -> None:
        values = tokenizer.shape.values
        assert images.facts.tokens == images.facts.documents * values
        # a view of the memory map: image i is row i
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
        # classifiers read brightness, which is the same for every number of levels
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
    # over the rows and the columns of each cell
    small: NDArray[np.uint8] = np.rint(cells.mean((2, 4))).astype(np.uint8)
    return small


def small_image_tokens(pixels: NDArray[np.uint8], reduction: int, tokenizer: PixelTokenizer) -> NDArray[np.int64]:
    """The tokens (n, s) of images in brightness, made `reduction` times smaller, row by row."""
    small = tokenizer.quantize(reduced_images(pixels, reduction))
    return small.reshape(len(pixels), -1).astype(np.int64) + FIRST_LEVEL_TOKEN


def _value_rows(values: NDArray[np.uint8], tokenizer: PixelTokenizer) -> tuple[Tensor, Tensor]:
    """BOS + x without its last token, and x, for the values x of each image in the tokenizer's order."""
    targets = torch.from_numpy(values[:, tokenizer.order].astype(np.int64) + FIRST_LEVEL_TOKEN)
    # the first value is predicted, too, from a token that stands before all images
    bos = torch.full_like(targets[:, :1], tokenizer.bos)
    return torch.cat([bos, targets[:, :-1]], dim=1), targets


class ImagesPipeline(FilePipeline[ImagesData, ImageSource, LengthBuckets]):
    """Images in the form "labelled", for a classifier, or "levels", as pixel tokens for a language model.

    "levels-of-classes" are levels with the class as a source, "levels-of-small" with a smaller image. A batch is
    bounded by its values (pixels times channels). Equal images fall into the same split.
    """

    section = ImagesData
    forms = ("labelled", "levels", "levels-of-classes", "levels-of-small")
    sides = ("image", "label")
    prepared_settings = ("size", "channels", "levels", "block")

    def open_sources(self, paths: PathOrPaths, split: str) -> list[ImageSource]:
        return [_select_part(open_image_files(path), split) for path in path_list(paths)]

    def split(self) -> Splits[ImageSource]:
        splits = super().split()
        if self.data.test is None:
            # images that come with test images are tested on those
            opened = [open_image_files(path) for path in path_list(self.data.path)]
            if test_sources := [parts["test"] for parts in opened if "test" in parts]:
                splits.sources["test"] = test_sources
        return splits

    def library(self) -> str | None:
        # images that are not converted do not depend on the version of Pillow
        if self.data.size is None and self.data.channels is None:
            return None
        return str(pillow().__version__)

    def open(self) -> OpenedData:
        if self.data.block is not None and self.form == "labelled":
            raise UserError("data.block is the order in which a language model reads images; a classifier has none")
        if self.data.reduction is not None and self.form != "levels-of-small":
            raise UserError("data.reduction is the size of the source of super-resolution; other models have none")
        return super().open()

    def prepare(self, splits: Splits[ImageSource], folder: Path) -> PreparationResult:
        data = self.data
        self.request.log(f"preparing images: {splits.sources['train'][0].name}")
        # of all sources before any image is written: class ids are positions in this list
        labels = sort_labels({label for source in splits.sources["train"] for label in source.labels()})
        if len(labels) == 1:
            raise UserError(
                f"all training images have the label {labels[0]!r}; there must be two labels at least, or none"
            )
        resize = ImageResize(data.size, data.channels)
        facts = ExampleFacts(splits.names)
        changes = ChangeCounts()
        folders = folders_of(source.name for source in splits.sources["train"])
        # the shape of the first image is that of all, and of the tokenizer
        first = next((resize.apply(record) for _, record in _split_images(splits)), None)
        if first is None:
            splits.check_counts(facts.counts, "images")
        assert first is not None
        tokenizer = PixelTokenizer(data.levels, ImageShape(*first.pixels.shape), data.block)
        self.tokenizers = TokenizerPair(tokenizer, tokenizer, labels or None)
        class_ids = self.tokenizers.class_ids()
        shard_names = [shard_name for name in splits.names for shard_name in self.shard_names(name)]
        with write_shards(folder, shard_names, max(256, len(labels))) as writers:
            for name, record in _split_images(splits):
                resized = resize.apply(record)
                check_same_shape(resized, first)
                count_changes(changes, resized)
                self._add_image([writers.shards[key] for key in self.shard_names(name)], resized, class_ids)
                label = record.label if self.uses_labels else None
                place = shown_place(record.location, folders)
                facts.add(name, max(record.pixels.shape[:2]), [place] if label is None else [place, label], label)
            splits.check_counts(facts.counts, "images")
        hashes = {name: shard.sha256 for name, shard in writers.facts.items()}
        sizes = LengthSummary.of(facts.lengths_of(splits.names), "pixels on the longer side", title="sizes")
        summary = DataSummary(
            noun="image",
            counts=facts.counts,
            labels=dict(facts.labels) or None,
            # without data.size all have the one that the model reads
            lengths=None if data.size is None else sizes,
            left_out=tuple(changes.findings("image", CHANGES)),
            examples=facts.examples,
        )
        return PreparationResult(self.tokenizers, writers.facts, hashes, {"images": facts.counts}, summary)

    def token_limits(self) -> tuple[int, ...]:
        return self.pixel_tokenizer.levels, max(1, len(self.tokenizers.labels or ()))

    def write_file(self, path: EvaluationPath) -> list[TokenShard]:
        if self.uses_labels:
            class_ids = self.tokenizers.class_ids()
        else:
            class_ids = {}
        return self._write_records(self._file_records(path), class_ids)

    def plan(self, shards: Sequence[TokenShard], split: str) -> LengthBuckets:
        shape = self.pixel_tokenizer.shape
        batch_tokens = self.request.batch_tokens
        dataset = self._dataset(shards)
        if split == "train":
            if batch_tokens < shape.values:
                raise UserError(
                    f"batch.tokens is {batch_tokens:,}, less than the {shape.values:,} values of one image ({shape}); "
                    f"128 images are batch.tokens={128 * shape.values}"
                )
            count = len(dataset.lengths)
            subject = f"the {count:,} training images have"
            check_fills_batch(count * shape.values, batch_tokens, subject, "images", unit="values")
        return LengthBuckets(dataset, batch_tokens)

    def units(self, shards: Sequence[TokenShard]) -> TextUnits | None:
        """For language models each value counts as one character and one byte."""
        values = shards[0].facts.tokens
        if self.form == "labelled":
            return None
        return TextUnits(values, values, values)

    def required_keywords(self) -> dict[str, int]:
        if self.form == "labelled":
            vocab = {}
        else:
            vocab = {"vocab": self.tokenizers.target.vocab}
        if self.form == "levels-of-small":
            return {**vocab, "reduction": self.data.source_reduction}
        if not self.uses_labels:
            return vocab
        if self.tokenizers.labels is None:
            raise UserError(f"{path_name(self.data.path)}: these images have no labels, which this model needs")
        return {**vocab, "classes": len(self.tokenizers.labels)}

    def offered_keywords(self) -> dict[str, int]:
        """The shape of images, and that of blocks for a language model."""
        tokenizer = self.pixel_tokenizer
        rows, columns = tokenizer.block
        if self.form == "labelled":
            blocks = {}
        else:
            blocks = {"block_height": rows, "block_width": columns}
        return tokenizer.shape._asdict() | blocks

    def length_limits(self, plans: Mapping[str, LengthBuckets]) -> Iterable[LengthLimit]:
        remedy = "scale images down with data.size, or build a longer model"
        return [LengthLimit(plans["train"].max_length, "an image", remedy)]

    def describe(
        self, splits: Splits[ImageSource], prepared: PreparedData, plans: Mapping[str, LengthBuckets]
    ) -> Iterator[str]:
        tokenizer = self.pixel_tokenizer
        labels = self.tokenizers.labels
        yield f"images: {splits.source_names()}; {'no' if labels is None else f'{len(labels):,}'} labels"
        for folder in filter(Path.is_dir, map(Path, path_list(self.data.path))):
            yield describe_folder(folder, folder_image_files(folder))
        yield from splits.notes()
        rows, columns = tokenizer.block
        order = "row by row"
        if (rows, columns) != (1, tokenizer.shape.width):
            order = f"in blocks of {rows} x {columns}"
        yield f"values: {tokenizer.shape}, {tokenizer.levels} levels, {order}"
        yield "; ".join(f"{name}: {count:,} images" for name, count in prepared.counts["images"].items())

    def summarize(
        self, splits: Splits[ImageSource], prepared: PreparedData, plans: Mapping[str, LengthBuckets]
    ) -> DataSummary:
        if prepared.summary is not None:
            return prepared.summary
        # files that earlier versions prepared have the counts alone
        counts = prepared.counts
        changes = change_findings(counts.get("changed", {}), counts.get("first_changed", {}), "image", CHANGES)
        return DataSummary("image", counts["images"], left_out=tuple(changes))

    def unlabelled(self, path: str) -> UnlabelledData:
        """The images of files as batches in their order."""
        inputs = []

        def records() -> Iterator[ImageRecord]:
            for record in self._file_records(path):
                inputs.append(UnlabelledInput(record.location, is_file=True))
                # a classifier's batches have labels; these are placeholders
                yield record._replace(label="")

        shards = self._write_records(records(), {"": 0})
        return UnlabelledData(inputs, batches_in_order(self._dataset(shards), IMAGES_PER_BATCH))

    @property
    def pixel_tokenizer(self) -> PixelTokenizer:
        """The tokenizer of the images."""
        assert isinstance(self.tokenizers.source, PixelTokenizer)
        return self.tokenizers.source

    @property
    def uses_labels(self) -> bool:
        """Whether the labels are read; a language model uses none."""
        return self.form in ("labelled", "levels-of-classes")

    def _dataset(self, shards: Sequence[TokenShard]) -> SequenceDataset:
        images, labels = shards
        tokenizer = self.pixel_tokenizer
        if self.form == "labelled":
            return LabelledImageDataset(images, labels, tokenizer)
        if self.form == "levels-of-classes":
            return ClassImageDataset(images, labels, tokenizer)
        if self.form == "levels-of-small":
            return SmallImageDataset(images, tokenizer, self.data.source_reduction)
        return PixelSequenceDataset(images, tokenizer)

    def _file_records(self, path: EvaluationPath) -> Iterator[ImageRecord]:
        """The images of files for a model, resized to its shape if the run resized its own."""
        shape = self.pixel_tokenizer.shape
        resize = ImageResize(self.data.size, self.data.channels or shape.channels)
        for record in map(resize.apply, self.read_file(path, lambda source: source.images())):
            if record.pixels.shape != shape:
                actual = ImageShape(*record.pixels.shape)
                raise UserError(
                    f"{record.location}: this image is {actual}, but the model was trained on images of {shape}"
                )
            yield record

    def _write_records(self, records: Iterable[ImageRecord], class_ids: Mapping[str, int]) -> list[TokenShard]:
        folder = self.request.cache
        changes = ChangeCounts()
        with write_shards(folder, self.sides, max(256, len(class_ids))) as writers:
            for record in records:
                count_changes(changes, record)
                self._add_image(list(writers.shards.values()), record, class_ids)
        self.log_findings(changes.findings("image", CHANGES))
        return [open_shard(folder, side, facts) for side, facts in writers.facts.items()]

    def _add_image(self, writers: Sequence[ShardWriter], record: ImageRecord, class_ids: Mapping[str, int]) -> None:
        """Add an image to the shards of the sides, with its label if there are classes."""
        # in raster order: the order of tokens is applied when batches are made, so that it can be changed
        values = self.pixel_tokenizer.quantize(record.pixels).ravel().astype(np.int32)
        writers[0].add(values, starts_document=True)
        if class_ids:
            # in a folder a label is a folder, and this image is in none
            if record.label is None:
                raise UserError(f"{record.location}: this image has no label")
            writers[1].add([class_id(class_ids, record.label, record.location)], starts_document=True)


def _select_part(parts: dict[ImagePart, ImageSource], split: str) -> ImageSource:
    """The part of this split, or else the part without a name. Raises UserError if there is neither."""
    if split not in parts and "" not in parts:
        name = next(iter(parts.values())).name
        raise UserError(f"{name}: there are no {split} images in it, only images for {', '.join(parts)}")
    return parts[split if split in parts else ""]


def _split_images(splits: Splits[ImageSource]) -> Iterator[tuple[str, ImageRecord]]:
    """Stream every image with its split."""
    for name, sources in splits.sources.items():
        for source in sources:
            for record in source.images():
                # by its pixels before they are resized, so that a copy of an image is never held out
                yield splits.assign(record.pixels.tobytes()) if name == "train" else name, record


def unlabelled_images(data: ImagesData, tokenizers: TokenizerPair, path: str, request: OpenRequest) -> UnlabelledData:
    """The images of an image file, or of files in any format of training data; labels are ignored."""
    return ImagesPipeline(data, "labelled", request, tokenizers).unlabelled(path)


IMAGES = register(ImagesPipeline.data_kind(unlabelled=unlabelled_images))
