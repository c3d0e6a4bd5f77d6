"""Output of generated images: pictures of new images and of completed ones."""

from pathlib import Path
from typing import Any, NamedTuple

from manyformer.cli.console import print_note, print_result, status_line
from manyformer.errors import UserError
from manyformer.evaluate import held_images
from manyformer.generate import image_generation
from manyformer.generate.result import GenerationStats
from manyformer.models import Model
from manyformer.view import draw_completed, draw_samples

SAMPLES, COMPLETED = "samples.png", "completed.png"
SAMPLE_COUNT, COMPLETED_COUNT, TRIES = 64, 8, 4
"""The default numbers of new images, of completed ones, and of the completions of each."""


class ImageJob(NamedTuple):
    """What to generate: new images, and completions of held-out images or of those in `data`, `tries` times each."""

    samples: int | None = None
    complete: int | None = None
    tries: int | None = None
    data: str | None = None
    temperature: float | None = None
    seed: int | None = None
    out: Path | None = None


def write_images(model: Model, run: str, job: ImageJob, *, stats: bool) -> None:
    """Generate the images of the job and write the pictures into the folder `job.out`, by default that of the run."""
    samples = SAMPLE_COUNT if job.samples is None else job.samples
    completed = COMPLETED_COUNT if job.complete is None else job.complete
    if not samples and not completed:
        raise UserError("nothing to generate: set --samples or --complete above 0")
    folder, results = Path(run) if job.out is None else job.out, list[GenerationStats]()
    with status_line(f"generating images with {run}") as status:
        options: dict[str, Any] = {
            "temperature": 1.0 if job.temperature is None else job.temperature,
            "seed": job.seed,
            "on_progress": lambda share: status(f"{run}: {share:.0%}"),
        }
        if samples:
            result = image_generation.paint(model, samples, **options)
            draw_samples(result.images, folder / SAMPLES)
            print_result(str(folder / SAMPLES))
            results.append(result.stats)
        if completed:
            rows = image_generation.half_image_rows(image_generation.pixel_tokenizer_of(model))
            originals = held_images(run, completed, data=job.data)
            result = image_generation.complete(model, originals, rows=rows, tries=job.tries or TRIES, **options)
            draw_completed(originals, result.images, rows, folder / COMPLETED)
            print_result(str(folder / COMPLETED))
            results.append(result.stats)
    if stats:
        for result_stats in results:
            print_note(str(result_stats))
