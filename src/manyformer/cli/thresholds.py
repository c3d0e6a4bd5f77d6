"""`manyformer thresholds`: what models that tokens leave early still write well, in how many layers, and how fast."""

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from manyformer.cli.app import JUDGE, app, examples

if TYPE_CHECKING:
    from manyformer.exits import PromptSet, ThresholdPoint
    from manyformer.exits.early_decoding import ThresholdValues


@app.command(
    "thresholds",
    rich_help_panel=JUDGE,
    epilog=examples(
        "manyformer thresholds runs/calm",
        "manyformer thresholds runs/calm runs/depth-adaptive --values 0.9 --values 0.5 --out sweep --rounds 3",
        "manyformer thresholds runs/depth-adaptive --draws 50",
    ),
)
def thresholds(
    runs: Annotated[list[str], typer.Argument(help="The folders of runs whose models tokens leave early.")],
    *,
    values: Annotated[list[float] | None, typer.Option(help="A threshold for all layers; may be given again.")] = None,
    draws: Annotated[
        int | None, typer.Option(min=1, help="So many random thresholds for each layer; the best of each cost is kept.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the random thresholds.")] = 0,
    split: Annotated[
        Literal["valid", "test"], typer.Option(help="The held-out data that prompts come from.")
    ] = "valid",
    prompts: Annotated[int, typer.Option(min=1, help="How many prompts are written to.")] = 200,
    batch: Annotated[int, typer.Option(min=1, help="Rows that are written together.")] = 32,
    rounds: Annotated[int, typer.Option(min=1, help="How often all is timed, in turns.")] = 1,
    tokenize: Annotated[
        str | None, typer.Option(help="BLEU: sacrebleu's tokenizer; none for text that is tokenized.")
    ] = None,
    out: Annotated[str, typer.Option(help="The folder of the table and the picture.")] = "thresholds",
    device: Annotated[str | None, typer.Option(help="cpu or cuda; a GPU where there is one unless given.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the table as JSON.")] = False,
) -> None:
    """Sweep the thresholds at which tokens leave a model on held-out data, and tell quality, layers and speed.

    Translations are scored by BLEU, all texts by how near they are to what the full model writes. A rule without a
    threshold is shown as it was trained.
    """
    from dataclasses import asdict
    from pathlib import Path

    from manyformer.cli.console import print_json, print_result, print_table, status_line
    from manyformer.cli.model_arguments import model_folder, place
    from manyformer.errors import UserError
    from manyformer.exits.prompts_from_run import material
    from manyformer.exits.sweep import HEADS, VALUES, sweep, table, write_points

    if values and draws:
        raise UserError("give either --values or --draws, not both")
    found: list[ThresholdPoint] = []
    with status_line(f"writing with {len(runs)} models") as status:
        for run in runs:
            model_folder(run)
            there = material(run, split=split, count=prompts, rows=batch, device=place(device))
            chosen: list[ThresholdValues] = list(values or VALUES) if draws is None else _drawn(there, draws, seed)
            points = sweep(
                Path(run).name, there, chosen, tokenize=tokenize, rounds=rounds,
                each=lambda point: status(f"{point.model}: threshold {point.label}, {point.layers:.2f} layers"),
            )  # fmt: skip
            found += points if draws is None else _best(points)
    files = write_points(found, Path(out))
    if as_json:
        print_json([asdict(point) for point in found])
        return
    print_table(HEADS, table(found), right=(2, 3, 4, 5, 6))
    print_result(f"wrote {', '.join(map(str, files))}")


def _drawn(there: "PromptSet", draws: int, seed: int) -> "list[ThresholdValues]":
    from manyformer.exits.early_decoding import stack_of
    from manyformer.exits.sweep import drawn

    return list(drawn(stack_of(there.task.model).depth, draws, seed))


def _best(points: "list[ThresholdPoint]") -> "list[ThresholdPoint]":
    from manyformer.exits.sweep import best_in_bins

    return [points[0], *best_in_bins(points[1:])]
