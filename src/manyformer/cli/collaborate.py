"""`manyformer collaborate`: convert a trained model to shared query and key dimensions."""

from typing import Annotated

import typer

from manyformer.cli.app import USE, app, examples


@app.command(
    "collaborate",
    rich_help_panel=USE,
    epilog=examples(
        "manyformer collaborate runs/lm-stdlib --shared 64 --out runs/lm-stdlib-64",
        "manyformer evaluate runs/lm-stdlib",
    ),
)
def collaborate(
    run: Annotated[str, typer.Argument(help="The folder of a run or a saved model: a transformer-lm or a bert.")],
    *,
    shared: Annotated[
        int,
        typer.Option(min=1, help="Number of query and key dimensions that all heads share; dim gives the exact model."),
    ],
    out: Annotated[str, typer.Option(help="The folder of the new model.")],
    rounds: Annotated[
        int, typer.Option(min=1, help="Maximum number of iterations of alternating least squares.")
    ] = 100,
    starts: Annotated[int, typer.Option(min=1, help="Number of restarts, of which the best is taken.")] = 2,
    seed: Annotated[int, typer.Option(help="Seed of the restarts after the first.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the errors as JSON.")] = False,
) -> None:
    """Convert a trained model so that its heads share query and key dimensions (Cordonnier et al. 2020).

    The products of all heads' query and key projections form one tensor, which is decomposed into fewer dimensions;
    values and all other weights are unchanged. Reports the relative error of each layer's score weights. Needs
    tensorly."""
    from pathlib import Path

    from manyformer.api import load
    from manyformer.cli.console import print_json, print_result, print_table, status_line
    from manyformer.cli.model_arguments import copy_tokenizers, model_folder
    from manyformer.errors import UserError
    from manyformer.head_sharing import collaborate as share
    from manyformer.model_summary import count_parameters

    folder = model_folder(run)
    if Path(out).exists():
        raise UserError(f"{out} exists already; choose another --out")
    model = load(folder)
    with status_line(f"decomposing the heads of {run}"):
        result = share(model, shared=shared, rounds=rounds, starts=starts, seed=seed)
    result.model.save(out)
    copy_tokenizers(folder, Path(out))
    parameters_before, parameters_after = count_parameters(model), count_parameters(result.model)
    if as_json:
        print_json(
            {"out": out, "shared": shared, "errors": result.errors, "parameters": [parameters_before, parameters_after]}
        )
        return
    print_table(
        ("attention", "relative error of the scores' weights"),
        [(name, f"{error:.4f}") for name, error in result.errors.items()],
        right=(1,),
    )
    print_result(f"{parameters_before:,} parameters before, {parameters_after:,} after")
    print_result(f"wrote {out}")
