"""`caption_images`: what a trained captioner writes about image files."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from manyformer.data.findings import ChangeCounts
from manyformer.data.image_decoding import CHANGES
from manyformer.data.image_files import open_image_files
from manyformer.data.image_reading import ImageRecord, ImageResize, count_changes
from manyformer.data.kind import no_log
from manyformer.errors import UserError
from manyformer.evaluate.eval_data import open_run, task_of_run
from manyformer.generate import Decoding, Hypothesis, SourceBatch, answer_sources
from manyformer.system.devices import SMALLER_WORK, report_out_of_memory
from manyformer.type_aliases import LogFn

IMAGES_PER_BATCH = 32


class ImageCaption(NamedTuple):
    """The location of an image, and the captions that were found for it, the best first."""

    location: str
    captions: tuple[Hypothesis, ...]


def caption_images(
    run: str | Path, path: str, decoding: Decoding, *, device: str | None = None, log: LogFn = no_log
) -> Iterator[ImageCaption]:
    """Yield the captions of the images at `path`, in order, by the final model of the run.

    `path` is an image file, a folder, or an archive or IDX file of images; square images are resized to the model's
    size. `device` None selects a GPU if there is one. The log is told at the end what was changed in images. Raises
    UserError for another run and for a bad file.
    """
    trained = open_run(run)
    task = task_of_run(trained.config)
    if task.command != "caption":
        raise UserError(
            f"the run in {run} ({trained.config.recipe}) captions no images, it is for {task.title}; "
            f"use `manyformer {task.command} {run}`"
        )
    model: Any = trained.load_model(device)
    changes = ChangeCounts()
    records = _records(path, model.embed_source.shape, changes)
    tokenizers = (trained.tokenizers.source, trained.tokenizers.target)
    with report_out_of_memory(f"in the captions of {path}", SMALLER_WORK):
        while batch := list(islice(records, IMAGES_PER_BATCH)):
            images = torch.from_numpy(np.stack([record.pixels for record in batch]))
            answers = answer_sources(model, SourceBatch(images, None), tokenizer=tokenizers, decoding=decoding).rows
            for record, captions in zip(batch, answers, strict=True):
                yield ImageCaption(record.location, captions)
    for finding in changes.findings("image", CHANGES):
        log(str(finding))


def _records(path: str, shape: tuple[int, int, int], changes: ChangeCounts) -> Iterator[ImageRecord]:
    """The images at `path` in the model's shape, whose changes are counted.

    Raises UserError for one that cannot have it."""
    height, width, channels = shape
    for source in open_image_files(path).values():
        for record in source.images():
            is_square = record.pixels.shape[0] == record.pixels.shape[1] and height == width
            resized = ImageResize(height if is_square else None, channels).apply(record)
            if resized.pixels.shape != shape:
                actual = " x ".join(map(str, record.pixels.shape[:2]))
                raise UserError(f"{record.location}: this image is {actual}, and the model reads {height} x {width}")
            count_changes(changes, resized)
            yield resized
