"""Opening images: read, divided, made alike and written to shards once, then batches of images or of sequences."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from manyformer.config import ImagesData
from manyformer.data.cache_folder import PreparationResult, PreparedData, load_or_prepare
from manyformer.data.epochs import HeldOutBatches, TextUnits
from manyformer.data.image_examples import LabelledImageDataset, PixelSequenceDataset
from manyformer.data.image_files import open_image_files
from manyformer.data.image_reading import (
    ImageCollection,
    ImagePart,
    ImageRecord,
    ImageResize,
    order_of_labels,
    pillow,
    refuse_other_shape,
)
from manyformer.data.length_buckets import LengthBuckets, SequenceDataset
from manyformer.data.opened import LengthLimit, OpenedData
from manyformer.data.pair_tables import bytes_fraction
from manyformer.data.pixel_tokenizer import ImageShape, PixelTokenizer
from manyformer.data.sampler import Sampler
from manyformer.data.saved_tokenizers import TokenizerPair
from manyformer.data.token_shards import ShardWriters, TokenShard, open_shard, writing_shards
from manyformer.errors import UserError, nearest

Say = Callable[[str], None]
SIDES = ("image", "label")
"""The shards of each split."""


class ImageSplits(NamedTuple):
    """Albums by split; without any for a split, `shares` of the training images are held out for it."""

    albums: dict[str, list[tuple[ImageCollection, ImagePart]]]
    shares: dict[str, float]

    @property
    def names(self) -> list[str]:
        """All splits, training first."""
        return list(dict.fromkeys(["train", *self.shares, *self.albums]))

    def pictures(self) -> Iterator[tuple[str, ImageRecord]]:
        """Every image with its split; equal images share their lot."""
        for name, albums in self.albums.items():
            for each, part in albums:
                for picture in each.pictures(part):
                    yield (self._lot(picture) if name == "train" else name), picture

    def labels(self) -> set[str]:
        """The labels of the training images."""
        return {label for each, part in self.albums["train"] for label in each.labels(part)}

    def _lot(self, picture: ImageRecord) -> str:
        rest = bytes_fraction(picture.pixels.tobytes())
        for name, share in self.shares.items():
            if rest < share:
                return name
            rest -= share
        return "train"


def open_images(data: ImagesData, task: str, *, batch_tokens: int, cache: Path, seed: int, say: Say) -> OpenedData:
    """Images for a classifier of images, or as sequences of levels for a language model.

    `batch_tokens` bounds the values (pixels times channels) of a batch.
    """
    if data.block is not None and task == "image-classification":
        raise UserError("data.block is the order in which a language model reads images; a classifier has none")
    collection = _collection(data)
    asked: dict[str, Any] = {"kind": "images", "size": data.size, "channels": data.channels, "levels": data.levels}
    asked |= {"block": data.block, "shares": collection.shares, "stamps": _stamps(collection)}
    if data.size is not None or data.channels is not None:
        asked["library"] = pillow().__version__
    ready = load_or_prepare(cache, asked, lambda: _make(data, collection, cache, say))
    if task == "image-classification" and ready.tokenizers.labels is None:
        raise UserError(
            f"{collection.albums['train'][0][0].name}: these images have no labels, which a classifier needs"
        )
    examples = {name: examples_of(ready, f"{name}.", task) for name in collection.names}
    _refuse_little(len(examples["train"].lengths), _levels(ready.tokenizers).shape, batch_tokens)
    held = {name: held_out(one, task, batch_tokens) for name, one in examples.items() if name != "train"}
    shape = _levels(ready.tokenizers).shape
    return OpenedData(
        task=task,
        tokenizers=ready.tokenizers,
        train=Sampler(LengthBuckets(examples["train"], np.arange(len(examples["train"].lengths)), batch_tokens), seed),
        valid=held["valid"],
        test=held.get("test"),
        lines=tuple(_lines(collection, ready)),
        spans=(LengthLimit(shape.values, "an image", "scale images down with data.size, or build a longer model"),),
        cache=cache,
    )


def examples_of(ready: PreparedData, prefix: str, task: str) -> SequenceDataset:
    """The images of a split as a task wants them."""
    images, labels = (ready.shards[f"{prefix}{side}"] for side in SIDES)
    levels = _levels(ready.tokenizers)
    return (
        LabelledImageDataset(images, labels, levels)
        if task == "image-classification"
        else PixelSequenceDataset(images, levels)
    )


def held_out(examples: SequenceDataset, task: str, batch_tokens: int) -> HeldOutBatches:
    """The images in a fixed order; as sequences, each value counts as a character and a byte."""
    values = int(examples.lengths.sum())
    units = None if task == "image-classification" else TextUnits(values, values, values)
    return HeldOutBatches(LengthBuckets(examples, np.arange(len(examples.lengths)), batch_tokens).fixed(), units)


def other_images(
    data: ImagesData, tokenizers: TokenizerPair, paths: str | Sequence[str], room: Path, task: str
) -> SequenceDataset:
    """Images for a model that is there already; `room` is a folder for their shards."""
    levels = _levels(tokenizers)
    # who writes images asks for no labels
    classes = _numbers(tokenizers.labels if task == "image-classification" else None)
    # scaled as the model wants them wherever the run scaled
    fit = ImageResize(data.size, data.channels or levels.shape.channels)
    with writing_shards(room, SIDES, max(256, len(classes))) as writers:
        for each, part in _albums(paths, "test"):
            for picture in each.pictures(part):
                _refuse_shape(fitted := fit.apply(picture), levels.shape)
                _add(writers, "", fitted, levels, classes)
    shards: dict[str, TokenShard] = {side: open_shard(room, side, facts) for side, facts in writers.facts.items()}
    return examples_of(PreparedData(tokenizers, shards, {}), "", task)


def _collection(data: ImagesData) -> ImageSplits:
    albums = {"train": _albums(data.path, "train")}
    shares = {}
    if isinstance(data.valid, float):
        shares["valid"] = data.valid
    else:
        albums["valid"] = _albums(data.valid, "valid")
    # files that come with test images are tested on them
    own = [(each, "test") for each, _ in albums["train"] if "test" in each.parts()]
    if data.test is not None or own:
        albums["test"] = own if data.test is None else _albums(data.test, "test")
    return ImageSplits(albums, shares)


def _albums(paths: str | Sequence[str], wanted: ImagePart) -> list[tuple[ImageCollection, ImagePart]]:
    found = [open_image_files(path) for path in ([paths] if isinstance(paths, str) else paths)]
    return [(each, each.choose(wanted)) for each in found]


def _stamps(collection: ImageSplits) -> dict[str, list[list[str | int]]]:
    return {name: [[*each.stamp(), part] for each, part in albums] for name, albums in collection.albums.items()}


def _make(data: ImagesData, collection: ImageSplits, cache: Path, say: Say) -> PreparationResult:
    say(f"preparing images: {collection.albums['train'][0][0].name}")
    labels = order_of_labels(collection.labels())
    if len(labels) == 1:
        raise UserError(f"all training images have the label {labels[0]!r}; there must be two labels at least, or none")
    classes, fit = _numbers(labels), ImageResize(data.size, data.channels)
    counts = dict.fromkeys(collection.names, 0)
    first: ImageRecord | None = None
    levels: PixelTokenizer | None = None
    shards = [f"{name}.{side}" for name in counts for side in SIDES]
    with writing_shards(cache, shards, max(256, len(labels))) as writers:
        for name, picture in collection.pictures():
            fitted = fit.apply(picture)
            if first is None or levels is None:
                first, levels = fitted, PixelTokenizer(data.levels, ImageShape(*fitted.pixels.shape), data.block)
            refuse_other_shape(fitted, first)
            _add(writers, f"{name}.", fitted, levels, classes)
            counts[name] += 1
        _refuse_empty(collection, counts)
    assert levels is not None
    made = TokenizerPair(levels, levels, labels or None)
    hashes = {name: facts.sha256 for name, facts in writers.facts.items()}
    return PreparationResult(made, writers.facts, hashes, {"images": counts})


def _add(
    writers: ShardWriters, prefix: str, picture: ImageRecord, levels: PixelTokenizer, classes: dict[str, int]
) -> None:
    """An image into the shards of a split. Raises UserError for a label that is not among the classes."""
    writers.shards[f"{prefix}image"].add(levels.quantise(picture.pixels).ravel().astype(np.int32), begins=True)
    if not classes:
        return
    if picture.label not in classes:
        told = (
            f"the label {picture.label!r} does not occur in the training data; {nearest(str(picture.label), classes)}"
        )
        raise UserError(f"{picture.where}: {'this image has no label' if picture.label is None else told}")
    writers.shards[f"{prefix}label"].add([classes[picture.label]], begins=True)


def _refuse_shape(picture: ImageRecord, shape: ImageShape) -> None:
    if picture.pixels.shape != shape:
        found = ImageShape(*picture.pixels.shape)
        raise UserError(f"{picture.where}: this image is {found}, and the model was trained on images of {shape}")


def _refuse_empty(collection: ImageSplits, counts: dict[str, int]) -> None:
    for name, count in counts.items():
        if not count:
            where = ", ".join(each.name for each, _ in collection.albums.get(name, collection.albums["train"]))
            if name in collection.shares:
                raise UserError(f"{where}: too few images to hold out {collection.shares[name]} of them")
            raise UserError(f"{where}: there are no images in it (data.{'path' if name == 'train' else name})")


def _refuse_little(images: int, shape: ImageShape, batch_tokens: int) -> None:
    if batch_tokens < shape.values:
        raise UserError(
            f"batch.tokens is {batch_tokens:,}, less than the {shape.values:,} values of one image ({shape}); "
            f"128 images are batch.tokens={128 * shape.values}"
        )
    if images * shape.values < batch_tokens:
        raise UserError(
            f"the {images:,} training images have {images * shape.values:,} values, fewer than one batch of "
            f"{batch_tokens:,} (batch.tokens); give more images or set batch.tokens lower"
        )


def _levels(tokenizers: TokenizerPair) -> PixelTokenizer:
    assert isinstance(tokenizers.source, PixelTokenizer)
    return tokenizers.source


def _numbers(labels: Sequence[str] | None) -> dict[str, int]:
    return {label: number for number, label in enumerate(labels or ())}


def _lines(collection: ImageSplits, ready: PreparedData) -> Iterator[str]:
    levels, labels = _levels(ready.tokenizers), ready.tokenizers.labels
    told = "no labels" if labels is None else f"{len(labels):,} labels"
    yield f"images: {', '.join(each.name for each, _ in collection.albums['train'])}; {told}"
    rows, columns = levels.block
    order = "row by row" if (rows, columns) == (1, levels.shape.width) else f"in blocks of {rows} x {columns}"
    yield f"values: {levels.shape}, {levels.levels} levels, {order}"
    yield "; ".join(f"{name}: {count:,} images" for name, count in ready.counts["images"].items())
