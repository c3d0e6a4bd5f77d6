"""Opening images: split, resized and written to shards once, then read as batches of images or pixel sequences."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from manyformer.batches import TextUnits
from manyformer.config import ImagesData
from manyformer.data.cache_folder import PreparationResult, PreparedData
from manyformer.data.image_examples import LabelledImageDataset, PixelSequenceDataset
from manyformer.data.image_files import open_image_files
from manyformer.data.image_reading import (
    CollectionPart,
    ImageRecord,
    ImageResize,
    check_same_shape,
    pillow,
    sort_labels,
)
from manyformer.data.kind import OpenRequest, register
from manyformer.data.length_buckets import LengthBuckets, SequenceDataset, batches_in_order, check_fills_batch
from manyformer.data.opened import (
    EvaluationPath,
    LengthLimit,
    OpenedData,
    UnlabelledData,
    UnlabelledInput,
    path_name,
)
from manyformer.data.pixel_tokenizer import ImageShape, PixelTokenizer
from manyformer.data.prepared_kind import Opening, PreparedKind
from manyformer.data.saved_tokenizers import TokenizerPair, class_id
from manyformer.data.splits import PathOrPaths, Splits, path_list
from manyformer.data.token_shards import ShardWriter, TokenShard, open_shard, write_shards
from manyformer.errors import UserError

IMAGES_PER_BATCH = 64
"""Images whose labels are predicted together."""


class ImagesKind(PreparedKind[ImagesData, CollectionPart, LengthBuckets]):
    """Images in the form "labelled", for a classifier, or "levels", as pixel tokens for a language model.

    A batch is bounded by its values (pixels times channels). Equal images fall into the same split.
    """

    section = ImagesData
    forms = ("labelled", "levels")
    sides = ("image", "label")
    prepared_settings = ("size", "channels", "levels", "block")

    def open_sources(self, data: ImagesData, paths: PathOrPaths, split: str, cache: Path) -> list[CollectionPart]:
        return [open_image_files(path).select_part(split) for path in path_list(paths)]

    def split(self, data: ImagesData, cache: Path) -> Splits[CollectionPart]:
        splits = super().split(data, cache)
        # collections with test images are tested on those
        collections = [source.collection for source in splits.sources["train"]]
        test_parts = [CollectionPart(images, "test") for images in collections if "test" in images.parts()]
        if test_parts and data.test is None:
            splits.sources["test"] = test_parts
        return splits

    def library(self, data: ImagesData) -> str | None:
        return None if data.size is None and data.channels is None else str(pillow().__version__)

    def open(self, data: ImagesData, form: str, request: OpenRequest) -> OpenedData:
        if data.block is not None and form == "labelled":
            raise UserError("data.block is the order in which a language model reads images; a classifier has none")
        return super().open(data, form, request)

    def prepare(self, data: ImagesData, splits: Splits[CollectionPart], request: OpenRequest) -> PreparationResult:
        request.log(f"preparing images: {splits.sources['train'][0].name}")
        labels = sort_labels(
            {label for source in splits.sources["train"] for label in source.collection.labels(source.part)}
        )
        if len(labels) == 1:
            raise UserError(
                f"all training images have the label {labels[0]!r}; there must be two labels at least, or none"
            )
        resize, counts = ImageResize(data.size, data.channels), dict.fromkeys(splits.names, 0)
        first = next((resize.apply(record) for _, record in _split_images(splits)), None)
        if first is None:
            splits.check_counts(counts, "images")
        assert first is not None
        tokenizer = PixelTokenizer(data.levels, ImageShape(*first.pixels.shape), data.block)
        tokenizers = TokenizerPair(tokenizer, tokenizer, labels or None)
        add_image = _image_writer(tokenizers)
        shard_names = [shard_name for name in splits.names for shard_name in self.shard_names(name)]
        with write_shards(request.cache, shard_names, max(256, len(labels))) as writers:
            for name, record in _split_images(splits):
                resized = resize.apply(record)
                check_same_shape(resized, first)
                add_image([writers.shards[shard_name] for shard_name in self.shard_names(name)], resized)
                counts[name] += 1
            splits.check_counts(counts, "images")
        hashes = {name: facts.sha256 for name, facts in writers.facts.items()}
        return PreparationResult(tokenizers, writers.facts, hashes, {"images": counts})

    def write_file(self, opening: Opening[ImagesData], path: EvaluationPath) -> list[TokenShard]:
        # language models use no labels
        labels = opening.tokenizers.labels if opening.form == "labelled" else None
        return self._write_records(opening, self._file_records(opening, path), labels)

    def plan(self, opening: Opening[ImagesData], shards: Sequence[TokenShard], split: str) -> LengthBuckets:
        shape, batch_tokens = _pixel_tokenizer(opening).shape, opening.request.batch_tokens
        dataset = self._dataset(opening, shards)
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

    def units(self, opening: Opening[ImagesData], shards: Sequence[TokenShard]) -> TextUnits | None:
        """For language models each value counts as one character and one byte."""
        values = shards[0].facts.tokens
        return None if opening.form == "labelled" else TextUnits(values, values, values)

    def required_keywords(self, opening: Opening[ImagesData]) -> dict[str, int]:
        if opening.form != "labelled":
            return {"vocab": opening.tokenizers.target.vocab}
        if opening.tokenizers.labels is None:
            raise UserError(f"{path_name(opening.data.path)}: these images have no labels, which a classifier needs")
        return {"classes": len(opening.tokenizers.labels)}

    def offered_keywords(self, opening: Opening[ImagesData]) -> dict[str, int]:
        """The shape of images, and that of blocks for a language model."""
        tokenizer = _pixel_tokenizer(opening)
        rows, columns = tokenizer.block
        blocks = {} if opening.form == "labelled" else {"block_height": rows, "block_width": columns}
        return tokenizer.shape._asdict() | blocks

    def length_limits(self, opening: Opening[ImagesData], plans: Mapping[str, LengthBuckets]) -> Iterable[LengthLimit]:
        remedy = "scale images down with data.size, or build a longer model"
        return [LengthLimit(plans["train"].max_length, "an image", remedy)]

    def describe(
        self,
        opening: Opening[ImagesData],
        splits: Splits[CollectionPart],
        prepared: PreparedData,
        plans: Mapping[str, LengthBuckets],
    ) -> Iterator[str]:
        tokenizer, labels = _pixel_tokenizer(opening), opening.tokenizers.labels
        yield f"images: {splits.source_names()}; {'no' if labels is None else f'{len(labels):,}'} labels"
        rows, columns = tokenizer.block
        order = "row by row" if (rows, columns) == (1, tokenizer.shape.width) else f"in blocks of {rows} x {columns}"
        yield f"values: {tokenizer.shape}, {tokenizer.levels} levels, {order}"
        yield "; ".join(f"{name}: {count:,} images" for name, count in prepared.counts["images"].items())

    def unlabelled(
        self, data: ImagesData, tokenizers: TokenizerPair, path: str, request: OpenRequest
    ) -> UnlabelledData:
        """The images of an image file, or of files in any format of training data; labels are ignored."""
        opening, inputs = Opening(data, "labelled", tokenizers, request), []

        def records() -> Iterator[ImageRecord]:
            for record in self._file_records(opening, path):
                inputs.append(UnlabelledInput(record.location, is_file=True))
                # a classifier's batches have labels; these are placeholders
                yield record._replace(label="")

        shards = self._write_records(opening, records(), ("",))
        return UnlabelledData(inputs, batches_in_order(self._dataset(opening, shards), IMAGES_PER_BATCH))

    def _dataset(self, opening: Opening[ImagesData], shards: Sequence[TokenShard]) -> SequenceDataset:
        images, labels = shards
        tokenizer = _pixel_tokenizer(opening)
        if opening.form == "labelled":
            return LabelledImageDataset(images, labels, tokenizer)
        return PixelSequenceDataset(images, tokenizer)

    def _file_records(self, opening: Opening[ImagesData], path: EvaluationPath) -> Iterator[ImageRecord]:
        """The images of files for a model, resized to its shape if the run resized its own."""
        shape = _pixel_tokenizer(opening).shape
        resize = ImageResize(opening.data.size, opening.data.channels or shape.channels)
        for source in self.open_sources(opening.data, path, "test", opening.request.cache):
            for record in map(resize.apply, source.collection.images(source.part)):
                if record.pixels.shape != shape:
                    actual = ImageShape(*record.pixels.shape)
                    raise UserError(
                        f"{record.location}: this image is {actual}, but the model was trained on images of {shape}"
                    )
                yield record

    def _write_records(
        self, opening: Opening[ImagesData], records: Iterable[ImageRecord], labels: tuple[str, ...] | None
    ) -> list[TokenShard]:
        folder = opening.request.cache
        add_image = _image_writer(opening.tokenizers._replace(labels=labels))
        with write_shards(folder, self.sides, max(256, len(labels or ()))) as writers:
            for record in records:
                add_image(list(writers.shards.values()), record)
        return [open_shard(folder, side, facts) for side, facts in writers.facts.items()]


def _split_images(splits: Splits[CollectionPart]) -> Iterator[tuple[str, ImageRecord]]:
    """Stream every image with its split."""
    for name, sources in splits.sources.items():
        for source in sources:
            for record in source.collection.images(source.part):
                yield splits.assign(record.pixels.tobytes()) if name == "train" else name, record


def _image_writer(tokenizers: TokenizerPair) -> Callable[[Sequence[ShardWriter], ImageRecord], None]:
    """A function that adds an image to the two shards of a split. It raises UserError for a label without a class."""
    tokenizer, class_ids = tokenizers.source, tokenizers.class_ids()
    assert isinstance(tokenizer, PixelTokenizer)

    def add(writers: Sequence[ShardWriter], record: ImageRecord) -> None:
        images, labels = writers
        images.add(tokenizer.quantize(record.pixels).ravel().astype(np.int32), starts_document=True)
        if class_ids:
            if record.label is None:
                raise UserError(f"{record.location}: this image has no label")
            labels.add([class_id(class_ids, record.label, record.location)], starts_document=True)

    return add


def _pixel_tokenizer(opening: Opening[ImagesData]) -> PixelTokenizer:
    assert isinstance(opening.tokenizers.source, PixelTokenizer)
    return opening.tokenizers.source


_KIND = ImagesKind()
IMAGES = register(_KIND.data_kind(unlabelled=_KIND.unlabelled))
