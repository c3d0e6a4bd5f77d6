"""`manyformer collaborate`: let the heads of a trained model share the dimensions of queries and keys."""

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
        int, typer.Option(min=1, help="Dimensions of queries and keys for all heads together; dim changes nothing.")
    ],
    out: Annotated[str, typer.Option(help="The folder of the new model.")],
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of alternating least squares at most.")] = 100,
    starts: Annotated[int, typer.Option(min=1, help="How often to begin anew; the best is taken.")] = 2,
    seed: Annotated[int, typer.Option(help="Draws the starts after the first.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the errors as JSON.")] = False,
) -> None:
    """Let the heads of a trained model share the dimensions of their queries and keys (Cordonnier et al. 2020).

    The products of all heads' projections are one tensor, decomposed into fewer dimensions; values and all other
    weights stay. Tells how far the weights of the scores are from the old ones in each layer. Needs tensorly.
    """
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
        found = share(model, shared=shared, rounds=rounds, starts=starts, seed=seed)
    found.model.save(out)
    copy_tokenizers(folder, Path(out))
    before, after = count_parameters(model), count_parameters(found.model)
    if as_json:
        print_json({"out": out, "shared": shared, "errors": found.errors, "parameters": [before, after]})
        return
    print_table(
        ("attention", "relative error of the scores' weights"),
        [(name, f"{error:.4f}") for name, error in found.errors.items()],
        right=(1,),
    )
    print_result(f"{before:,} parameters before, {after:,} now")
    print_result(f"wrote {out}")
