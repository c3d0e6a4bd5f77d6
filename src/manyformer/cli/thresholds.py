"""`manyformer thresholds`: quality, layers and speed of early-exit models by exit threshold."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from manyformer.cli.app import JUDGE, command
from manyformer.cli.console import print_json, print_result, print_table, status_line
from manyformer.cli.model_arguments import model_folder, resolve_device
from manyformer.cli.shared_options import (
    BatchOption,
    DeviceOption,
    JsonOption,
    PromptCountOption,
    PromptSplitOption,
    RoundsOption,
    TokenizeOption,
)
from manyformer.cli.shell_completion import complete_runs
from manyformer.errors import UserError


@command(
    JUDGE,
    "manyformer thresholds runs/calm",
    "manyformer thresholds runs/calm runs/depth-adaptive --values 0.9 --values 0.5 --out sweep --rounds 3",
    "manyformer thresholds runs/depth-adaptive --draws 50",
)
def thresholds(
    runs: Annotated[
        list[str], Argument(help="The folders of runs of early-exit models.", autocompletion=complete_runs)
    ],
    *,
    values: Annotated[list[float] | None, Option(help="A threshold for all layers; may be given again.")] = None,
    draws: Annotated[int | None, Option(min=1, help="Random threshold vectors; the best of each cost remain.")] = None,
    seed: Annotated[int, Option(min=0, help="Seed of the random thresholds.")] = 0,
    split: PromptSplitOption = "valid",
    prompts: PromptCountOption = 200,
    batch: BatchOption = 32,
    rounds: RoundsOption = 1,
    tokenize: TokenizeOption = None,
    out: Annotated[str, Option(help="The folder of the table and the picture.")] = "thresholds",
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Early-exit sweep: quality, layers and speed of models on held-out data for a range of exit thresholds.

    Translations are scored by BLEU, all texts by their similarity to the full model's. A rule without a threshold is
    measured as it was trained.
    """
    from manyformer.exits import ThresholdPoint, load_prompts, sweep
    from manyformer.exits.early_decoding import early_exit_stack
    from manyformer.exits.sweep import (
        DEFAULT_THRESHOLDS,
        TABLE_HEADER,
        best_in_bins,
        random_thresholds,
        table_rows,
        write_points,
    )

    if values and draws:
        raise UserError("give either --values or --draws, not both")
    points: list[ThresholdPoint] = []
    with status_line(f"generating with {len(runs)} models") as status:
        for run in runs:
            model_folder(run)
            prompt_set = load_prompts(run, split=split, count=prompts, rows=batch, device=resolve_device(device))
            depth = early_exit_stack(prompt_set.workload.model).depth
            points_of_run = sweep(
                Path(run).name,
                prompt_set,
                values or DEFAULT_THRESHOLDS if draws is None else random_thresholds(depth, draws, seed),
                tokenize=tokenize,
                rounds=rounds,
                on_point=lambda point: status(f"{point.model}: threshold {point.label}, {point.layers:.2f} layers"),
            )
            points += points_of_run if draws is None else [points_of_run[0], *best_in_bins(points_of_run[1:])]
    files = write_points(points, Path(out))
    if as_json:
        print_json([asdict(point) for point in points])
        return
    print_table(TABLE_HEADER, table_rows(points), right=(2, 3, 4, 5, 6))
    print_result(f"wrote {', '.join(map(str, files))}")
