"""`manyformer memorize`: add a kNN memory to a trained language model."""

from typing import Annotated

import typer

from manyformer.cli.app import USE, app, examples


@app.command(
    "memorize",
    rich_help_panel=USE,
    epilog=examples(
        "manyformer memorize runs/lm-memory --memory 8192 --out runs/memory-8k",
        "manyformer train lm/memory recipe=memorizing-transformer init_from=runs/memory-8k",
    ),
)
def memorize(
    run: Annotated[
        str, typer.Argument(help="The folder of a run or a saved model: a transformer-xl or a memorizing-transformer.")
    ],
    *,
    memory: Annotated[int, typer.Option(min=1, help="Number of key-value pairs for each row and head.")],
    out: Annotated[str, typer.Option(help="The folder of the new model.")],
    layer: Annotated[
        int | None, typer.Option(min=1, help="The layer, counted from 1; three quarters up unless given.")
    ] = None,
    neighbours: Annotated[int | None, typer.Option(min=1, help="Number of pairs that each query retrieves.")] = None,
    block: Annotated[
        int | None, typer.Option(min=1, help="Documents are added to the memory in blocks of this many tokens.")
    ] = None,
    gate: Annotated[float | None, typer.Option(help="Initial weight of the memory, between 0 and 1.")] = None,
) -> None:
    """Add a kNN memory of cached keys and values to one layer of a trained model (Wu et al. 2022).

    The new model has the same weights and its outputs are initially close to the old model's. To make use of the
    memory, train it further: as recipe memorizing-transformer with the printed keywords, `packing: contiguous` and this
    model as `init_from`."""
    from pathlib import Path

    from manyformer.api import load
    from manyformer.cli.console import print_result
    from manyformer.cli.model_arguments import copy_tokenizers, model_folder
    from manyformer.errors import UserError
    from manyformer.knn_memory import DEFAULT_GATE
    from manyformer.knn_memory import memorize as give
    from manyformer.recipes import get_recipe

    folder = model_folder(run)
    if Path(out).exists():
        raise UserError(f"{out} exists already; choose another --out")
    keywords = {"memory": memory, "layer": layer, "neighbours": neighbours, "block": block}
    model = give(load(folder), gate=DEFAULT_GATE if gate is None else gate, **keywords)  # type: ignore[arg-type]
    model.save(out)
    copy_tokenizers(folder, Path(out))
    recipe, model_keywords, _ = model.spec
    defaults = get_recipe(recipe).signature.parameters
    changed = {
        name: value for name, value in model_keywords.items() if value != defaults[name].default and name != "vocab"
    }
    settings = " ".join(f"model.{name}={value}" for name, value in changed.items())
    print_result(f"{recipe}: {settings}")
    print_result(f"wrote {out}")
