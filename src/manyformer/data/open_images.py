"""Opening images: split, resized and written to shards once, then read as batches of images or pixel sequences."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from manyformer.batches import TextUnits
from manyformer.config import ImagesData
from manyformer.data.cache_folder import PreparationResult, PreparedData, load_or_prepare
from manyformer.data.example_splits import check_fills_batch, held_out_batches, split_batches
from manyformer.data.image_examples import LabelledImageDataset, PixelSequenceDataset
from manyformer.data.image_files import open_image_files
from manyformer.data.image_reading import (
    ImageCollection,
    ImagePart,
    ImageRecord,
    ImageResize,
    check_same_shape,
    pillow,
    sort_labels,
)
from manyformer.data.kind import DataKind, OpenRequest, prepared_split, register
from manyformer.data.length_buckets import SequenceDataset, batches_in_order
from manyformer.data.opened import (
    EvaluationData,
    EvaluationPath,
    LengthLimit,
    OpenedData,
    UnlabelledData,
    UnlabelledInput,
    path_name,
)
from manyformer.data.pair_tables import bytes_fraction
from manyformer.data.pixel_tokenizer import ImageShape, PixelTokenizer
from manyformer.data.saved_tokenizers import TokenizerPair
from manyformer.data.token_shards import ShardWriters, TokenShard, open_shard, write_shards
from manyformer.errors import UserError, suggest_names

IMAGES_PER_BATCH = 64
"""Images whose labels are predicted together."""
SHARD_NAMES = ("image", "label")
"""The shards of each split."""


class ImageSplits(NamedTuple):
    """The collections of each split; a split without one holds out the fraction in `shares` of training images."""

    collections: dict[str, list[tuple[ImageCollection, ImagePart]]]
    shares: dict[str, float]

    @property
    def names(self) -> list[str]:
        """The names of all splits, training first."""
        return list(dict.fromkeys(["train", *self.shares, *self.collections]))

    def images(self) -> Iterator[tuple[str, ImageRecord]]:
        """Stream every image with its split; equal images fall into the same split."""
        for name, collections in self.collections.items():
            for collection, part in collections:
                for record in collection.images(part):
                    yield (self._assign_split(record) if name == "train" else name), record

    def labels(self) -> set[str]:
        """The labels of the training images."""
        return {label for collection, part in self.collections["train"] for label in collection.labels(part)}

    def _assign_split(self, record: ImageRecord) -> str:
        fraction = bytes_fraction(record.pixels.tobytes())
        for name, share in self.shares.items():
            if fraction < share:
                return name
            fraction -= share
        return "train"


def open_images(data: ImagesData, form: str, request: OpenRequest) -> OpenedData:
    """Open images in the form "labelled", for a classifier, or "levels", as pixel tokens for a language model.

    `request.batch_tokens` bounds the values (pixels times channels) of a batch.
    """
    if data.block is not None and form == "labelled":
        raise UserError("data.block is the order in which a language model reads images; a classifier has none")
    splits = _image_splits(data)
    settings: dict[str, Any] = {"kind": "images", "size": data.size, "channels": data.channels, "levels": data.levels}
    settings |= {"block": data.block, "shares": splits.shares, "stamps": _stamps(splits)}
    if data.size is not None or data.channels is not None:
        settings["library"] = pillow().__version__
    prepared = load_or_prepare(request.cache, settings, lambda: _prepare(data, splits, request))
    required, offered = _model_keywords(splits, prepared.tokenizers, form)
    datasets = {name: _image_dataset(prepared.shards, f"{name}.", prepared.tokenizers, form) for name in splits.names}
    shape, images = _pixel_tokenizer(prepared.tokenizers).shape, len(datasets["train"].lengths)
    _check_batch_size(images, shape, request.batch_tokens)
    batches = split_batches(
        datasets, np.arange(images), request.batch_tokens, request.seed, lambda name: _units(datasets[name], form)
    )
    return OpenedData(
        tokenizers=prepared.tokenizers,
        **batches._asdict(),
        summary_lines=tuple(_summary_lines(splits, prepared)),
        length_limits=(
            LengthLimit(shape.values, "an image", "scale images down with data.size, or build a longer model"),
        ),
        cache=request.cache,
        required_keywords=required,
        offered_keywords=offered,
    )


def held_out_images(data: ImagesData, form: str, request: OpenRequest, split: str | None) -> EvaluationData:
    """The images of a held-out split."""
    name, prepared = prepared_split(open_images, data, form, request, split)
    dataset = _image_dataset(prepared.shards, f"{name}.", prepared.tokenizers, form)
    return EvaluationData(name, held_out_batches(dataset, request.batch_tokens, _units(dataset, form)))


def images_of_file(
    data: ImagesData, form: str, tokenizers: TokenizerPair, path: EvaluationPath, request: OpenRequest
) -> EvaluationData:
    """The images of files, in any format of training data."""
    tokenizer = _pixel_tokenizer(tokenizers)
    # language models use no labels
    class_ids = _class_ids(tokenizers.labels if form == "labelled" else None)
    with write_shards(request.cache, SHARD_NAMES, max(256, len(class_ids))) as writers:
        for record in _records_of_files(data, tokenizer.shape, path):
            _add_image(writers, "", record, tokenizer, class_ids)
    shards = {side: open_shard(request.cache, side, facts) for side, facts in writers.facts.items()}
    dataset = _image_dataset(shards, "", tokenizers, form)
    return EvaluationData(path_name(path), held_out_batches(dataset, request.batch_tokens, _units(dataset, form)))


def unlabelled_images(data: ImagesData, tokenizers: TokenizerPair, path: str, request: OpenRequest) -> UnlabelledData:
    """The images of an image file, or of files in any format of training data; labels are ignored."""
    tokenizer, inputs = _pixel_tokenizer(tokenizers), []
    with write_shards(request.cache, SHARD_NAMES, 256) as writers:
        for record in _records_of_files(data, tokenizer.shape, path):
            # a classifier's batches have labels; these are placeholders
            _add_image(writers, "", record._replace(label=""), tokenizer, {"": 0})
            inputs.append(UnlabelledInput(record.location, is_file=True))
    shards = {side: open_shard(request.cache, side, facts) for side, facts in writers.facts.items()}
    dataset = _image_dataset(shards, "", tokenizers, "labelled")
    return UnlabelledData(inputs, batches_in_order(dataset, IMAGES_PER_BATCH))


def _records_of_files(data: ImagesData, shape: ImageShape, path: EvaluationPath) -> Iterator[ImageRecord]:
    """The images of files for a model, resized to its shape if the run resized its own."""
    resize = ImageResize(data.size, data.channels or shape.channels)
    for collection, part in _open_collections(path, "test"):
        for record in collection.images(part):
            _check_shape(resized := resize.apply(record), shape)
            yield resized


def _image_dataset(
    shards: Mapping[str, TokenShard], prefix: str, tokenizers: TokenizerPair, form: str
) -> SequenceDataset:
    images, labels = (shards[f"{prefix}{side}"] for side in SHARD_NAMES)
    tokenizer = _pixel_tokenizer(tokenizers)
    if form == "labelled":
        return LabelledImageDataset(images, labels, tokenizer)
    return PixelSequenceDataset(images, tokenizer)


def _units(dataset: SequenceDataset, form: str) -> TextUnits | None:
    """For language models each value counts as one character and one byte."""
    values = int(dataset.lengths.sum())
    return None if form == "labelled" else TextUnits(values, values, values)


def _model_keywords(splits: ImageSplits, tokenizers: TokenizerPair, form: str) -> tuple[dict[str, int], dict[str, int]]:
    """The keywords that every model needs, and those for models that accept them: the shape of images and blocks."""
    tokenizer = _pixel_tokenizer(tokenizers)
    if form != "labelled":
        rows, columns = tokenizer.block
        return {"vocab": tokenizer.vocab}, tokenizer.shape._asdict() | {"block_height": rows, "block_width": columns}
    if tokenizers.labels is None:
        raise UserError(
            f"{splits.collections['train'][0][0].name}: these images have no labels, which a classifier needs"
        )
    return {"classes": len(tokenizers.labels)}, tokenizer.shape._asdict()


def _image_splits(data: ImagesData) -> ImageSplits:
    collections = {"train": _open_collections(data.path, "train")}
    shares = {}
    if isinstance(data.valid, float):
        shares["valid"] = data.valid
    else:
        collections["valid"] = _open_collections(data.valid, "valid")
    # collections with test images are tested on those
    test_parts = [(collection, "test") for collection, _ in collections["train"] if "test" in collection.parts()]
    if data.test is not None or test_parts:
        collections["test"] = test_parts if data.test is None else _open_collections(data.test, "test")
    return ImageSplits(collections, shares)


def _open_collections(paths: str | Sequence[str], part: ImagePart) -> list[tuple[ImageCollection, ImagePart]]:
    collections = [open_image_files(path) for path in ([paths] if isinstance(paths, str) else paths)]
    return [(collection, collection.select_part(part)) for collection in collections]


def _stamps(splits: ImageSplits) -> dict[str, list[list[str | int]]]:
    return {
        name: [[*collection.stamp(), part] for collection, part in collections]
        for name, collections in splits.collections.items()
    }


def _prepare(data: ImagesData, splits: ImageSplits, request: OpenRequest) -> PreparationResult:
    request.log(f"preparing images: {splits.collections['train'][0][0].name}")
    labels = sort_labels(splits.labels())
    if len(labels) == 1:
        raise UserError(f"all training images have the label {labels[0]!r}; there must be two labels at least, or none")
    class_ids, resize = _class_ids(labels), ImageResize(data.size, data.channels)
    counts = dict.fromkeys(splits.names, 0)
    first: ImageRecord | None = None
    tokenizer: PixelTokenizer | None = None
    shards = [f"{name}.{side}" for name in counts for side in SHARD_NAMES]
    with write_shards(request.cache, shards, max(256, len(labels))) as writers:
        for name, record in splits.images():
            resized = resize.apply(record)
            if first is None or tokenizer is None:
                first, tokenizer = resized, PixelTokenizer(data.levels, ImageShape(*resized.pixels.shape), data.block)
            check_same_shape(resized, first)
            _add_image(writers, f"{name}.", resized, tokenizer, class_ids)
            counts[name] += 1
        _check_not_empty(splits, counts)
    assert tokenizer is not None
    tokenizer_pair = TokenizerPair(tokenizer, tokenizer, labels or None)
    hashes = {name: facts.sha256 for name, facts in writers.facts.items()}
    return PreparationResult(tokenizer_pair, writers.facts, hashes, {"images": counts})


def _add_image(
    writers: ShardWriters, prefix: str, record: ImageRecord, tokenizer: PixelTokenizer, class_ids: dict[str, int]
) -> None:
    """Add an image to the shards of a split. Raises UserError for a label that is not among the classes."""
    writers.shards[f"{prefix}image"].add(
        tokenizer.quantize(record.pixels).ravel().astype(np.int32), starts_document=True
    )
    if not class_ids:
        return
    if record.label not in class_ids:
        unknown_label = (
            f"the label {record.label!r} does not occur in the training data; "
            f"{suggest_names(str(record.label), class_ids)}"
        )
        raise UserError(f"{record.location}: {'this image has no label' if record.label is None else unknown_label}")
    writers.shards[f"{prefix}label"].add([class_ids[record.label]], starts_document=True)


def _check_shape(record: ImageRecord, shape: ImageShape) -> None:
    if record.pixels.shape != shape:
        actual = ImageShape(*record.pixels.shape)
        raise UserError(f"{record.location}: this image is {actual}, but the model was trained on images of {shape}")


def _check_not_empty(splits: ImageSplits, counts: dict[str, int]) -> None:
    for name, count in counts.items():
        if not count:
            collection_names = ", ".join(
                collection.name for collection, _ in splits.collections.get(name, splits.collections["train"])
            )
            if name in splits.shares:
                raise UserError(f"{collection_names}: too few images to hold out {splits.shares[name]} of them")
            raise UserError(
                f"{collection_names}: there are no images in it (data.{'path' if name == 'train' else name})"
            )


def _check_batch_size(images: int, shape: ImageShape, batch_tokens: int) -> None:
    if batch_tokens < shape.values:
        raise UserError(
            f"batch.tokens is {batch_tokens:,}, less than the {shape.values:,} values of one image ({shape}); "
            f"128 images are batch.tokens={128 * shape.values}"
        )
    subject = f"the {images:,} training images have"
    check_fills_batch(images * shape.values, batch_tokens, subject, "images", unit="values")


def _pixel_tokenizer(tokenizers: TokenizerPair) -> PixelTokenizer:
    assert isinstance(tokenizers.source, PixelTokenizer)
    return tokenizers.source


def _class_ids(labels: Sequence[str] | None) -> dict[str, int]:
    return {label: number for number, label in enumerate(labels or ())}


def _summary_lines(splits: ImageSplits, prepared: PreparedData) -> Iterator[str]:
    tokenizer, labels = _pixel_tokenizer(prepared.tokenizers), prepared.tokenizers.labels
    label_text = "no labels" if labels is None else f"{len(labels):,} labels"
    yield f"images: {', '.join(collection.name for collection, _ in splits.collections['train'])}; {label_text}"
    rows, columns = tokenizer.block
    order = "row by row" if (rows, columns) == (1, tokenizer.shape.width) else f"in blocks of {rows} x {columns}"
    yield f"values: {tokenizer.shape}, {tokenizer.levels} levels, {order}"
    yield "; ".join(f"{name}: {count:,} images" for name, count in prepared.counts["images"].items())


IMAGES = register(
    DataKind(
        section=ImagesData,
        forms=("labelled", "levels"),
        open=open_images,
        held_out=held_out_images,
        from_file=images_of_file,
        unlabelled=unlabelled_images,
    )
)
