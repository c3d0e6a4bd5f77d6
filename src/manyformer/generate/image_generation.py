"""Images from a language model of images: whole ones, and begun ones completed."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from manyformer.data.pixel_tokenizer import FIRST, PixelTokenizer
from manyformer.errors import UserError
from manyformer.generate.decode_plan import DecodeJob, DecodePlan
from manyformer.generate.decoding import Decoding
from manyformer.generate.logits_processors import TemperatureProcessor
from manyformer.generate.result import GenerationStats
from manyformer.generate.token_choice import SampledChoice
from manyformer.models import LanguageModel, Model

ImageArray = NDArray[np.uint8]
"""Images (n, h, w, c) in brightness from 0 to 255."""

BATCH = 64
"""Images that are written together."""

ProgressFn = Callable[[float], None]


class GeneratedImages(NamedTuple):
    """Images (n, h, w, c), and what writing them took."""

    images: ImageArray
    stats: GenerationStats


def paint(
    model: Model,
    count: int,
    *,
    temperature: float = 1.0,
    seed: int | None = None,
    each: ProgressFn = lambda share: None,
) -> GeneratedImages:
    """`count` new images, drawn value by value; number n depends on `seed` + n alone.

    `each` is told how much is done, 0 to 1. Raises UserError for a model that did not learn from images.
    """
    parts = [(first, min(BATCH, count - first)) for first in range(0, count, BATCH)]
    picks = [SampledChoice(None if seed is None else seed + first, copies) for first, copies in parts]
    return _written(model, [(pick, [[]]) for pick in picks], temperature, each)


def complete(
    model: Model,
    images: ImageArray,
    *,
    rows: int | None = None,
    tries: int = 1,
    temperature: float = 1.0,
    seed: int | None = None,
    each: ProgressFn = lambda share: None,
) -> GeneratedImages:
    """Every image gone on with after its first `rows` rows, by default about half: `tries` images of each in turn.

    Number n of these depends on its beginning and `seed` + n alone. Raises UserError where images are not of the size
    that the model learned from, where it does not write all of the first `rows` rows first, and as `paint`.
    """
    levels = levels_of(model)
    rows = half(levels) if rows is None else rows
    if not 0 < rows < levels.shape.height or not _first(levels, rows):
        raise UserError(f"rows ({rows}) must be whole rows of blocks, and fewer than the {levels.shape.height} rows")
    if images.shape[1:] != levels.shape:
        raise UserError(f"images {images.shape} must be (n, {', '.join(map(str, levels.shape))})")
    begun = [levels.tokens(image)[: rows * levels.shape.width * levels.shape.channels] for image in images]
    size = max(1, BATCH // tries)
    parts = []
    for first in range(0, len(begun), size):
        pick = SampledChoice(None if seed is None else seed + first * tries, tries, seed_stride=tries)
        parts.append((pick, begun[first : first + size]))
    return _written(model, parts, temperature, each)


def levels_of(model: Model) -> PixelTokenizer:
    """What the model writes. Raises UserError for a model that did not learn to write images."""
    if not isinstance(model, LanguageModel) or not isinstance(model.tokenizer, PixelTokenizer):
        raise UserError("this model writes no images; a language model that has learned from images does")
    return model.tokenizer


def half(levels: PixelTokenizer) -> int:
    """The first rows of an image that are all written before any other: at most half of them.

    Raises UserError where there are none, because the first blocks are too high.
    """
    found = [rows for rows in range(1, levels.shape.height // 2 + 1) if _first(levels, rows)]
    if not found:
        raise UserError(f"this model writes blocks {levels.block[0]} rows high, so that no half comes first")
    return found[-1]


def _first(levels: PixelTokenizer, rows: int) -> bool:
    """Whether the values of the first rows are the first of all."""
    values = rows * levels.shape.width * levels.shape.channels
    return int(levels.order[:values].max()) < values


def _written(
    model: Model, parts: Sequence[tuple[SampledChoice, list[list[int]]]], temperature: float, each: ProgressFn
) -> GeneratedImages:
    levels = levels_of(model)
    images: list[ImageArray] = []
    stats: GenerationStats | None = None
    for number, (pick, begun) in enumerate(parts):
        work = _work(model, levels, pick, begun, temperature)
        total = pick.copies * sum(work.plan.limits)
        for count, _ in enumerate(work, 1):
            each((number + count / total) / len(parts))
        for beginning, answers in zip(begun, work.answers):
            images += [levels.image([*beginning, *answer.tokens]) for answer in answers]
        stats = work.stats if stats is None else stats + work.stats
    if stats is None:
        raise UserError("there is no image to write: ask for at least one")
    return GeneratedImages(np.stack(images), stats)


def _work(
    model: Model, levels: PixelTokenizer, pick: SampledChoice, begun: list[list[int]], temperature: float
) -> DecodeJob:
    """All values that are missing, one after the other; the last is never read, so that as many fit as there are."""
    assert isinstance(model, LanguageModel)
    shape = () if temperature == 1 else (TemperatureProcessor(temperature),)
    # special tokens stand for no level
    decoding = Decoding(choice=pick, processors=shape, stop_ids=(), ban=tuple(range(FIRST)))
    limits = [levels.shape.values - len(beginning) for beginning in begun]
    return DecodeJob(
        DecodePlan(model, [[levels.bos, *beginning] for beginning in begun], limits, decoding, None), len(begun)
    )
