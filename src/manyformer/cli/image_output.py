"""Output of generated images: pictures of new images, of completed ones, and of small ones that become large."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from manyformer.analysis.figures import draw_completed, draw_rows, draw_samples
from manyformer.base.errors import UserError
from manyformer.cli.console import print_note, print_result, status_line
from manyformer.data.images.open_images import reduced_images
from manyformer.inference.evaluate import held_images
from manyformer.inference.generate import image_generation
from manyformer.inference.generate.image_generation import GeneratedImages
from manyformer.models import Model

SAMPLES = "samples.png"
COMPLETED = "completed.png"
ENLARGED = "enlarged.png"
SAMPLE_COUNT = 64
CLASS_COUNT = 8
COMPLETED_COUNT = 8
TRIES = 4
"""The default numbers of new images, of those of each class, of completed ones, and of the completions of each."""


class ImageJob(NamedTuple):
    """What to generate: new images, and completions of held-out images or of those in `data`, `tries` times each.

    `samples` are of each of the `classes`, all unless named, where the model has classes; `complete` is the number of
    images that are made large again where it has small images for a source."""

    samples: int | None = None
    complete: int | None = None
    classes: tuple[str, ...] = ()
    tries: int | None = None
    data: str | None = None
    temperature: float | None = None
    seed: int | None = None
    out: Path | None = None


def write_images(model: Model, run: str, job: ImageJob, *, stats: bool) -> None:
    """Generate the images of the job and write the pictures into the folder `job.out`, by default that of the run."""
    source_tokens = image_generation.source_tokens_of(model)
    draw: Callable[..., Iterator[tuple[GeneratedImages, Path]]] = _draw_new
    if source_tokens:
        # a class is one token, a small image has one for each of its values
        if source_tokens == 1:
            draw = _draw_classes
        else:
            draw = _draw_enlarged
    elif job.classes:
        raise UserError(f"the model in {run} generates images without a class: leave --class out")
    folder = Path(run) if job.out is None else job.out
    results = list[GeneratedImages]()
    with status_line(f"generating images with {run}") as status:
        options: dict[str, Any] = {
            "temperature": 1.0 if job.temperature is None else job.temperature,
            "seed": job.seed,
            "on_progress": lambda share: status(f"{run}: {share:.0%}"),
        }
        # each picture is named as soon as it is written
        for result, path in draw(model, run, job, folder, options):
            print_result(str(path))
            results.append(result)
    if stats:
        for result in results:
            print_note(str(result.stats))


def _draw_new(
    model: Model, run: str, job: ImageJob, folder: Path, options: dict[str, Any]
) -> Iterator[tuple[GeneratedImages, Path]]:
    """New images, and completed ones."""
    samples = SAMPLE_COUNT if job.samples is None else job.samples
    if job.complete is None:
        completed = COMPLETED_COUNT
    else:
        completed = job.complete
    if not samples and not completed:
        raise UserError("nothing to generate: set --samples or --complete above 0")
    if samples:
        result = image_generation.paint(model, samples, **options)
        draw_samples(result.images, folder / SAMPLES)
        yield result, folder / SAMPLES
    if completed:
        rows = image_generation.half_image_rows(image_generation.pixel_tokenizer_of(model))
        originals = held_images(run, completed, data=job.data, log=print_note)
        result = image_generation.complete(model, originals, rows=rows, tries=job.tries or TRIES, **options)
        draw_completed(originals, result.images, rows, folder / COMPLETED)
        yield result, folder / COMPLETED


def _draw_classes(
    model: Model, run: str, job: ImageJob, folder: Path, options: dict[str, Any]
) -> Iterator[tuple[GeneratedImages, Path]]:
    """Images of each class, a column for each."""
    if job.complete is not None or job.tries is not None or job.data is not None:
        raise UserError(f"the model in {run} generates images of classes: leave out --complete, --tries and --data")
    classes = job.classes or image_generation.class_labels_of(model)
    samples = CLASS_COUNT if job.samples is None else job.samples
    if not samples:
        raise UserError("nothing to generate: set --samples above 0")
    result = image_generation.paint_classes(model, classes, tries=samples, **options)
    # one list for each class; the rows of the picture take one image of each
    columns = [result.images[start : start + samples] for start in range(0, len(result.images), samples)]
    rows = [np.stack(row) for row in zip(*columns)]
    draw_rows(rows, folder / SAMPLES, dict(enumerate(classes)))
    yield result, folder / SAMPLES


def _draw_enlarged(
    model: Model, run: str, job: ImageJob, folder: Path, options: dict[str, Any]
) -> Iterator[tuple[GeneratedImages, Path]]:
    """Held-out images that were made small, made large again, beside the originals."""
    if job.samples is not None or job.classes:
        raise UserError(f"the model in {run} enlarges images, --complete of them: leave out --samples and --class")
    if job.complete is None:
        count = COMPLETED_COUNT
    else:
        count = job.complete
    tries = job.tries or TRIES
    if not count:
        raise UserError("nothing to generate: set --complete above 0")
    originals = held_images(run, count, data=job.data, log=print_note)
    reduction = originals.shape[1] // image_generation.small_shape_of(model).height
    small = reduced_images(originals, reduction)
    result = image_generation.enlarge(model, small, tries=tries, **options)
    # as large as the originals, with the pixels that the model has read
    pictured = small.repeat(reduction, 1).repeat(reduction, 2)
    rows = [
        np.stack([pictured[index], *result.images[index * tries : (index + 1) * tries], original])
        for index, original in enumerate(originals)
    ]
    draw_rows(rows, folder / ENLARGED, {0: "small", 1: "enlarged", tries + 1: "original"})
    yield result, folder / ENLARGED
