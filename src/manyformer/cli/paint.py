"""`manyformer paint`: let a model of images write some, and complete begun ones."""

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
    samples: Annotated[int, typer.Option(min=0, help=f"How many new images go into {SAMPLES}; 0 for none.")] = 64,
    complete: Annotated[
        int, typer.Option(min=0, help=f"Of how many held-out images the lower half is painted anew, in {COMPLETED}.")
    ] = 8,
    tries: Annotated[int, typer.Option(min=1, help="How often each of them is completed.")] = 4,
    data: Annotated[
        str | None, typer.Option(help="Complete these images instead of those that the run held out.")
    ] = None,
    temperature: Annotated[
        float, typer.Option(help="Below 1 bolder for the likely, above 1 for the unlikely; 1 is what was learned.")
    ] = 1.0,
    seed: Annotated[int | None, typer.Option(min=0, help="The same seed gives the same images.")] = None,
    out: Annotated[Path | None, typer.Option(help="The folder of the pictures; the run's unless given.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; a GPU where there is one unless given.")] = None,
    stats: Annotated[
        bool, typer.Option("--stats", help="Say how fast it was and what the cache took, on stderr.")
    ] = False,
) -> None:
    """Let a language model that has learned from images paint: new ones, and the lower halves of held-out ones.

    Every value is drawn given those before it, row by row or block by block as the model has learned to.
    """
    from manyformer.cli.console import print_note, print_result, status_line
    from manyformer.cli.model_arguments import writer
    from manyformer.errors import UserError
    from manyformer.evaluate import held_images
    from manyformer.generate import image_generation
    from manyformer.view import draw_completed, draw_samples

    if not samples and not complete:
        raise UserError("there is nothing to paint: give --samples or --complete a number above 0")
    model, folder, done = writer(run, device), Path(run) if out is None else out, []
    with status_line(f"painting with {run}") as status:
        how: dict[str, Any] = {
            "temperature": temperature,
            "seed": seed,
            "each": lambda share: status(f"{run}: {share:.0%}"),
        }
        if samples:
            done.append(image_generation.paint(model, samples, **how))
            draw_samples(done[-1].images, folder / SAMPLES)
            print_result(str(folder / SAMPLES))
        if complete:
            rows = image_generation.half(image_generation.levels_of(model))
            originals = held_images(run, complete, data=data)
            done.append(image_generation.complete(model, originals, rows=rows, tries=tries, **how))
            draw_completed(originals, done[-1].images, rows, folder / COMPLETED)
            print_result(str(folder / COMPLETED))
    if stats:
        for found in done:
            print_note(str(found.stats))
