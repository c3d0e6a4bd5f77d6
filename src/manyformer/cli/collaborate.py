"""`manyformer collaborate`: convert a trained model to shared query and key dimensions."""

from typing import Annotated

from typer import Argument, Option

from manyformer.cli.app import USE, command
from manyformer.cli.console import print_json, print_result, print_table, status_line
from manyformer.cli.model_arguments import check_new_folder, model_folder
from manyformer.cli.shared_options import JsonOption, NewFolderOption


@command(
    USE,
    "manyformer collaborate runs/lm-stdlib --shared 64 --out runs/lm-stdlib-64",
    "manyformer evaluate runs/lm-stdlib",
)
def collaborate(
    run: Annotated[str, Argument(help="The folder of a run or a saved model: a transformer-lm or a bert.")],
    *,
    shared: Annotated[int, Option(min=1, help="Query and key dimensions that heads share; dim gives the exact model.")],
    out: NewFolderOption,
    rounds: Annotated[int, Option(min=1, help="Maximum number of iterations of alternating least squares.")] = 100,
    starts: Annotated[int, Option(min=1, help="Number of restarts, of which the best is taken.")] = 2,
    seed: Annotated[int, Option(help="Seed of the restarts after the first.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Convert a trained model so that its heads share query and key dimensions (Cordonnier et al. 2020).

    The products of all heads' query and key projections form one tensor, which is decomposed into fewer dimensions;
    values and all other weights are unchanged. Reports the relative error of each layer's score weights. Needs
    tensorly."""

    from manyformer.api import load
    from manyformer.head_sharing import collaborate as share
    from manyformer.model_summary import count_parameters

    folder = model_folder(run)
    check_new_folder(out)
    model = load(folder)
    with status_line(f"decomposing the heads of {run}"):
        result = share(model, shared=shared, rounds=rounds, starts=starts, seed=seed)
    result.model.save(out, tokenizers_of=folder)
    parameters = [count_parameters(model), count_parameters(result.model)]
    if as_json:
        print_json({"out": out, "shared": shared, "errors": result.errors, "parameters": parameters})
        return
    rows = [(name, f"{error:.4f}") for name, error in result.errors.items()]
    print_table(("attention", "relative error of the scores' weights"), rows, right=(1,))
    print_result("{:,} parameters before, {:,} after".format(*parameters), f"wrote {out}")
