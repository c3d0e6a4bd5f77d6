"""Images from a model over pixels: new ones, also of a class, completions of given rows, enlargements of small ones."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from manyformer.base.errors import UserError, suggest_names
from manyformer.base.type_aliases import ImageArray, ProgressFn
from manyformer.data.tokenizers.pixel_tokenizer import FIRST_LEVEL_TOKEN, ImageShape, PixelTokenizer
from manyformer.inference.generate.decoding import Decoding, SampledChoice
from manyformer.inference.generate.generate import DecodeJob
from manyformer.inference.generate.logits_processors import TemperatureProcessor
from manyformer.inference.generate.prompts import DecoderPrompts, SourceBatch, SourcePrompts, TokenPrompts
from manyformer.inference.generate.result import GenerationStats
from manyformer.models import Model
from manyformer.models.embedding import SourceEmbedding
from manyformer.models.generative_model import as_generative

BATCH_SIZE = 64
"""Images that are generated together."""


class GeneratedImages(NamedTuple):
    """Images (n, h, w, c) and the statistics of their generation."""

    images: ImageArray
    stats: GenerationStats


def paint(
    model: Model,
    count: int,
    *,
    temperature: float = 1.0,
    seed: int | None = None,
    on_progress: ProgressFn = lambda share: None,
) -> GeneratedImages:
    """Sample `count` new images, value by value; image n depends on `seed` + n alone.

    `on_progress` is called with the completed share, 0 to 1. Raises UserError for a model not trained on images.
    """
    return _generate_images(model, [[]] * count, 1, temperature, seed, on_progress)


def complete(
    model: Model,
    images: ImageArray,
    *,
    rows: int | None = None,
    tries: int = 1,
    temperature: float = 1.0,
    seed: int | None = None,
    on_progress: ProgressFn = lambda share: None,
) -> GeneratedImages:
    """Complete every image from its first `rows` rows (by default about half), `tries` times each, image after image.

    Result n depends on its first rows and `seed` + n alone. Raises UserError for images of another size than those of
    the training data, for a model that does not generate the first `rows` rows first, and as `paint`.
    """
    tokenizer = pixel_tokenizer_of(model)
    rows = half_image_rows(tokenizer) if rows is None else rows
    if not 0 < rows < tokenizer.shape.height or not _rows_come_first(tokenizer, rows):
        raise UserError(f"rows ({rows}) must be whole rows of blocks, and fewer than the {tokenizer.shape.height} rows")
    if images.shape[1:] != tokenizer.shape:
        raise UserError(f"images {images.shape} must be (n, {', '.join(map(str, tokenizer.shape))})")
    # in the order of generation, in which the first rows are the first tokens
    prefixes = [tokenizer.tokens(image)[: rows * tokenizer.shape.width * tokenizer.shape.channels] for image in images]
    return _generate_images(model, prefixes, tries, temperature, seed, on_progress)


def paint_classes(
    model: Model,
    classes: Sequence[str],
    *,
    tries: int = 1,
    temperature: float = 1.0,
    seed: int | None = None,
    on_progress: ProgressFn = lambda share: None,
) -> GeneratedImages:
    """Sample `tries` images of each class, class after class; result n depends on its class and `seed` + n alone.

    Raises UserError for a class that the model does not have, and for a model that does not generate from classes."""
    labels = class_labels_of(model)
    ids = {label: number for number, label in enumerate(labels)}
    for label in classes:
        if label not in ids:
            raise UserError(f"the model has no class '{label}'; {suggest_names(label, labels)}")
    source = torch.tensor([[ids[label]] for label in classes])
    return _from_sources(model, source, tries, temperature, seed, on_progress)


def enlarge(
    model: Model,
    images: ImageArray,
    *,
    tries: int = 1,
    temperature: float = 1.0,
    seed: int | None = None,
    on_progress: ProgressFn = lambda share: None,
) -> GeneratedImages:
    """Sample `tries` large images for each small one, image after image; result n depends on it and `seed` + n alone.

    Raises UserError for images of another size than those that the model enlarges, and for other models."""
    expected = small_shape_of(model)
    if images.shape[1:] != expected:
        raise UserError(f"images {images.shape} must be (n, {', '.join(map(str, expected))})")
    # levels as the tokens of the source, behind the special ones
    tokens = pixel_tokenizer_of(model).quantize(images).reshape(len(images), -1).astype(np.int64) + FIRST_LEVEL_TOKEN
    return _from_sources(model, torch.from_numpy(tokens), tries, temperature, seed, on_progress)


def pixel_tokenizer_of(model: Model) -> PixelTokenizer:
    """The pixel tokenizer of the model. Raises UserError for a model that was not trained to generate images."""
    tokenizer = model.tokenizer
    if not isinstance(tokenizer, PixelTokenizer):
        raise UserError("this model generates no images; a language model that was trained on images does")
    return tokenizer


def source_tokens_of(model: Model) -> int:
    """The number of tokens of the source from which the model generates images; 0 without a source."""
    source: SourceEmbedding | None = getattr(model, "embed_source", None)
    if source is None:
        return 0
    return source.tokens or 0


def class_labels_of(model: Model) -> tuple[str, ...]:
    """The names of the classes from which the model generates. Raises UserError for other models."""
    pixel_tokenizer_of(model)
    if source_tokens_of(model) != 1 or not model.labels:
        raise UserError("this model generates no images of a class; image-transformer-classes does")
    return tuple(model.labels)


def small_shape_of(model: Model) -> ImageShape:
    """The shape of the images that the model enlarges. Raises UserError for other models."""
    shape = pixel_tokenizer_of(model).shape
    reduction = 0
    if model.spec is not None:
        reduction = model.spec.keywords.get("reduction", 0)
    if source_tokens_of(model) <= 1 or not reduction:
        raise UserError("this model enlarges no images; image-transformer-superresolution does")
    return ImageShape(shape.height // reduction, shape.width // reduction, shape.channels)


def half_image_rows(tokenizer: PixelTokenizer) -> int:
    """The largest number of first rows, at most half of the image, that are generated before all other rows.

    Raises UserError where there are none, because the first blocks are too high.
    """
    # blocks may reach over the middle of the image
    complete_rows = [rows for rows in range(1, tokenizer.shape.height // 2 + 1) if _rows_come_first(tokenizer, rows)]
    if not complete_rows:
        height = tokenizer.block[0]
        raise UserError(f"this model generates blocks {height} rows high, so no half of an image comes first")
    return complete_rows[-1]


def _rows_come_first(tokenizer: PixelTokenizer, rows: int) -> bool:
    """Whether the values of the first `rows` rows are generated before all other values."""
    count = rows * tokenizer.shape.width * tokenizer.shape.channels
    return int(tokenizer.order[:count].max()) < count


def _generate_images(
    model: Model,
    prefixes: Sequence[list[int]],
    tries: int,
    temperature: float,
    seed: int | None,
    on_progress: ProgressFn,
) -> GeneratedImages:
    """Complete the tokens of each prefix `tries` times; result n of all has the seed `seed` + n."""
    tokenizer = pixel_tokenizer_of(model)
    if source_tokens_of(model):
        raise UserError("this model generates images from a source: give a class, or a small image")
    rows = [[tokenizer.bos, *prefix] for prefix in prefixes]
    # the last value is never fed, so the start token fits in
    limits = [tokenizer.shape.values - len(prefix) for prefix in prefixes]

    def prompts(rows_of_batch: slice) -> TokenPrompts:
        return TokenPrompts(rows[rows_of_batch])

    return _decode(model, prompts, prefixes, limits, _ImageSampling(tries, temperature, seed), on_progress)


def _from_sources(
    model: Model,
    sources: Int[Tensor, "n s"],
    tries: int,
    temperature: float,
    seed: int | None,
    on_progress: ProgressFn,
) -> GeneratedImages:
    """Generate `tries` images for each source; result n of all has the seed `seed` + n."""
    limits = [pixel_tokenizer_of(model).shape.values] * len(sources)

    def prompts(rows_of_batch: slice) -> SourcePrompts:
        return SourcePrompts(SourceBatch(sources[rows_of_batch], None))

    prefixes: list[list[int]] = [[] for _ in limits]
    return _decode(model, prompts, prefixes, limits, _ImageSampling(tries, temperature, seed), on_progress)


class _ImageSampling(NamedTuple):
    """How values are drawn: `tries` images of each prompt, at this temperature, from this seed on."""

    tries: int
    temperature: float
    seed: int | None


def _decode(
    model: Model,
    make_prompts: Callable[[slice], DecoderPrompts],
    prefixes: Sequence[list[int]],
    limits: list[int],
    sampling: _ImageSampling,
    on_progress: ProgressFn,
) -> GeneratedImages:
    """The images of all prompts, each its prefix with at most so many new tokens, batch by batch."""
    tokenizer = pixel_tokenizer_of(model)
    tries, temperature, seed = sampling
    generative = as_generative(model, "make images")
    processors = () if temperature == 1 else (TemperatureProcessor(temperature),)
    # every prompt becomes `tries` rows
    batch_size = max(1, BATCH_SIZE // tries)
    images: list[ImageArray] = []
    stats: GenerationStats | None = None
    for start in range(0, len(prefixes), batch_size):
        batch = slice(start, start + batch_size)
        # the stride gives every image a seed of its own, the same however the images are cut into batches
        choice = SampledChoice(None if seed is None else seed + start * tries, tries, seed_stride=tries)
        # special tokens are not pixel values
        decoding = Decoding(choice=choice, processors=processors, stop_ids=(), ban=tuple(range(FIRST_LEVEL_TOKEN)))
        prompts = make_prompts(batch)
        new_tokens = limits[batch]
        job = DecodeJob(generative, prompts, decoding, None, batch_size=len(prompts), limits=new_tokens)
        for count, _ in enumerate(job, 1):
            # the share of this batch that is done, counted in pixel values of all its images
            on_progress((start + len(prompts) * count / (tries * sum(new_tokens))) / len(prefixes))
        for prefix, answers in zip(prefixes[batch], job.answers):
            images += [tokenizer.image([*prefix, *answer.tokens]) for answer in answers]
        stats = job.stats if stats is None else stats + job.stats
    if stats is None:
        raise UserError("there is no image to generate: ask for at least one")
    return GeneratedImages(np.stack(images), stats)
