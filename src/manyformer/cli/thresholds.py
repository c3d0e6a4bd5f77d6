"""`manyformer thresholds`: quality, layers and speed of early-exit models by exit threshold."""

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from manyformer.cli.app import JUDGE, DeviceOption, app, examples

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
    runs: Annotated[list[str], typer.Argument(help="The folders of runs of early-exit models.")],
    *,
    values: Annotated[list[float] | None, typer.Option(help="A threshold for all layers; may be given again.")] = None,
    draws: Annotated[
        int | None, typer.Option(min=1, help="Number of random threshold vectors; the best of each cost is kept.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random thresholds.")] = 0,
    split: Annotated[
        Literal["valid", "test"], typer.Option(help="The held-out data that prompts come from.")
    ] = "valid",
    prompts: Annotated[int, typer.Option(min=1, help="Number of prompts.")] = 200,
    batch: Annotated[int, typer.Option(min=1, help="Batch size of generation.")] = 32,
    rounds: Annotated[int, typer.Option(min=1, help="How many times each measurement is repeated, in turns.")] = 1,
    tokenize: Annotated[
        str | None, typer.Option(help="BLEU: sacrebleu's tokenizer; none for text that is tokenized.")
    ] = None,
    out: Annotated[str, typer.Option(help="The folder of the table and the picture.")] = "thresholds",
    device: DeviceOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the table as JSON.")] = False,
) -> None:
    """Early-exit sweep: quality, layers and speed of models on held-out data for a range of exit thresholds.

    Translations are scored by BLEU, all texts by their similarity to the full model's. A rule without a threshold is
    measured as it was trained.
    """
    from dataclasses import asdict
    from pathlib import Path

    from manyformer.cli.console import print_json, print_result, print_table, status_line
    from manyformer.cli.model_arguments import model_folder, resolve_device
    from manyformer.errors import UserError
    from manyformer.exits.prompts_from_run import load_prompts
    from manyformer.exits.sweep import DEFAULT_THRESHOLDS, TABLE_HEADER, sweep, table_rows, write_points

    if values and draws:
        raise UserError("give either --values or --draws, not both")
    swept: list[ThresholdPoint] = []
    with status_line(f"generating with {len(runs)} models") as status:
        for run in runs:
            model_folder(run)
            prompt_set = load_prompts(run, split=split, count=prompts, rows=batch, device=resolve_device(device))
            threshold_values: list[ThresholdValues] = (
                list(values or DEFAULT_THRESHOLDS) if draws is None else _random_thresholds(prompt_set, draws, seed)
            )
            points = sweep(
                Path(run).name, prompt_set, threshold_values, tokenize=tokenize, rounds=rounds,
                on_point=lambda point: status(f"{point.model}: threshold {point.label}, {point.layers:.2f} layers"),
            )  # fmt: skip
            swept += points if draws is None else _best_points(points)
    files = write_points(swept, Path(out))
    if as_json:
        print_json([asdict(point) for point in swept])
        return
    print_table(TABLE_HEADER, table_rows(swept), right=(2, 3, 4, 5, 6))
    print_result(f"wrote {', '.join(map(str, files))}")


def _random_thresholds(prompt_set: "PromptSet", draws: int, seed: int) -> "list[ThresholdValues]":
    from manyformer.exits.early_decoding import early_exit_stack
    from manyformer.exits.sweep import random_thresholds

    return list(random_thresholds(early_exit_stack(prompt_set.workload.model).depth, draws, seed))


def _best_points(points: "list[ThresholdPoint]") -> "list[ThresholdPoint]":
    from manyformer.exits.sweep import best_in_bins

    return [points[0], *best_in_bins(points[1:])]
