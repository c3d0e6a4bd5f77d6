"""`manyformer paint`: generate images, and complete partial ones."""

from pathlib import Path
from typing import Annotated, Any

import typer

from manyformer.cli.app import USE, app, examples

SAMPLES, COMPLETED = "samples.png", "completed.png"


@app.command(
    "paint",
    rich_help_panel=USE,
    epilog=examples(
        "manyformer paint runs/images-pixels",
        "manyformer paint runs/images-pixels --samples 100 --temperature 0.9 --seed 1 --out sheets",
        "manyformer paint runs/images-pixels --samples 0 --complete 12 --tries 3 --data mine.npz",
    ),
)
def paint(
    run: Annotated[str, typer.Argument(help="The folder of a run.")],
    *,
    samples: Annotated[int, typer.Option(min=0, help=f"Number of new images in {SAMPLES}; 0 for none.")] = 64,
    complete: Annotated[
        int, typer.Option(min=0, help=f"Number of held-out images whose lower half is generated, in {COMPLETED}.")
    ] = 8,
    tries: Annotated[int, typer.Option(min=1, help="Number of completions of each.")] = 4,
    data: Annotated[str | None, typer.Option(help="Complete these images instead of the run's held-out ones.")] = None,
    temperature: Annotated[
        float,
        typer.Option(help="Below 1 favors probable values, above 1 improbable ones; 1 is the learned distribution."),
    ] = 1.0,
    seed: Annotated[int | None, typer.Option(min=0, help="The same seed gives the same images.")] = None,
    out: Annotated[Path | None, typer.Option(help="The folder of the pictures; the run's unless given.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; a GPU where there is one unless given.")] = None,
    stats: Annotated[bool, typer.Option("--stats", help="Print speed and cache size to stderr.")] = False,
) -> None:
    """Generate images with a language model of images: new ones, and the lower halves of held-out ones.

    Every value is sampled given the earlier ones, row by row or block by block in the order of the model's data.
    """
    from manyformer.cli.console import print_note, print_result, status_line
    from manyformer.cli.model_arguments import load_generator
    from manyformer.errors import UserError
    from manyformer.evaluate import held_images
    from manyformer.generate import image_generation
    from manyformer.view import draw_completed, draw_samples

    if not samples and not complete:
        raise UserError("nothing to generate: set --samples or --complete above 0")
    model, folder, results = load_generator(run, device), Path(run) if out is None else out, []
    with status_line(f"painting with {run}") as status:
        options: dict[str, Any] = {
            "temperature": temperature,
            "seed": seed,
            "on_progress": lambda share: status(f"{run}: {share:.0%}"),
        }
        if samples:
            results.append(image_generation.paint(model, samples, **options))
            draw_samples(results[-1].images, folder / SAMPLES)
            print_result(str(folder / SAMPLES))
        if complete:
            rows = image_generation.half_image_rows(image_generation.pixel_tokenizer_of(model))
            originals = held_images(run, complete, data=data)
            results.append(image_generation.complete(model, originals, rows=rows, tries=tries, **options))
            draw_completed(originals, results[-1].images, rows, folder / COMPLETED)
            print_result(str(folder / COMPLETED))
    if stats:
        for result in results:
            print_note(str(result.stats))
