"""Images from a language model over pixels: new images, and completions of the first rows of given images."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from manyformer.data.pixel_tokenizer import FIRST_LEVEL_TOKEN, PixelTokenizer
from manyformer.errors import UserError
from manyformer.generate.decode_job import DecodeJob
from manyformer.generate.decoder_prompts import TokenPrompts
from manyformer.generate.decoding import Decoding
from manyformer.generate.logits_processors import TemperatureProcessor
from manyformer.generate.result import GenerationStats
from manyformer.generate.token_choice import SampledChoice
from manyformer.models import LanguageModel, Model
from manyformer.type_aliases import ImageArray, ProgressFn

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
    prefixes = [tokenizer.tokens(image)[: rows * tokenizer.shape.width * tokenizer.shape.channels] for image in images]
    return _generate_images(model, prefixes, tries, temperature, seed, on_progress)


def pixel_tokenizer_of(model: Model) -> PixelTokenizer:
    """The pixel tokenizer of the model. Raises UserError for a model that was not trained to generate images."""
    if not isinstance(model, LanguageModel) or not isinstance(model.tokenizer, PixelTokenizer):
        raise UserError("this model generates no images; a language model that was trained on images does")
    return model.tokenizer


def half_image_rows(tokenizer: PixelTokenizer) -> int:
    """The largest number of first rows, at most half of the image, that are generated before all other rows.

    Raises UserError where there are none, because the first blocks are too high.
    """
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
    assert isinstance(model, LanguageModel)
    processors = () if temperature == 1 else (TemperatureProcessor(temperature),)
    batch_size = max(1, BATCH_SIZE // tries)
    images: list[ImageArray] = []
    stats: GenerationStats | None = None
    for start in range(0, len(prefixes), batch_size):
        batch = prefixes[start : start + batch_size]
        choice = SampledChoice(None if seed is None else seed + start * tries, tries, seed_stride=tries)
        # special tokens are not pixel values
        decoding = Decoding(choice=choice, processors=processors, stop_ids=(), ban=tuple(range(FIRST_LEVEL_TOKEN)))
        rows = [[tokenizer.bos, *prefix] for prefix in batch]
        # the last value is never fed, so the start token fits in
        limits = [tokenizer.shape.values - len(prefix) for prefix in batch]
        job = DecodeJob(model, TokenPrompts(rows), decoding, None, batch_size=len(batch), limits=limits)
        for count, _ in enumerate(job, 1):
            on_progress((start + len(batch) * count / (tries * sum(limits))) / len(prefixes))
        for prefix, answers in zip(batch, job.answers):
            images += [tokenizer.image([*prefix, *answer.tokens]) for answer in answers]
        stats = job.stats if stats is None else stats + job.stats
    if stats is None:
        raise UserError("there is no image to generate: ask for at least one")
    return GeneratedImages(np.stack(images), stats)
