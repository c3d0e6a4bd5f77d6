"""`manyformer memorize`: give a trained language model a memory of very many old keys."""

from typing import Annotated

import typer

from manyformer.cli.app import USE, app, examples


@app.command(
    "memorize",
    rich_help_panel=USE,
    epilog=examples(
        "manyformer memorize runs/lm-memory --memory 8192 --out runs/memory-8k",
        "manyformer train lm-memory recipe=memorizing-transformer start=runs/memory-8k",
    ),
)
def memorize(
    run: Annotated[
        str,
        typer.Argument(help="The folder of a run or a saved model: a transformer-xl or a memorizing-transformer."),
    ],
    *,
    memory: Annotated[int, typer.Option(min=1, help="Pairs of key and value for each row and head.")],
    out: Annotated[str, typer.Option(help="The folder of the new model.")],
    layer: Annotated[
        int | None, typer.Option(min=1, help="Which layer, from 1; three quarters up unless given.")
    ] = None,
    neighbours: Annotated[int | None, typer.Option(min=1, help="How many each query looks up.")] = None,
    block: Annotated[
        int | None, typer.Option(min=1, help="A document enters the memory in pieces of so many tokens.")
    ] = None,
    gate: Annotated[float | None, typer.Option(help="What the memory counts at first, between 0 and 1.")] = None,
) -> None:
    """Let one layer of a trained model look up the most similar of very many old keys (Wu et al. 2022).

    The new model has the same weights and begins near the old one. It makes use of its memory once it has been trained
    further: as recipe memorizing-transformer with the keywords that are told, data in lanes and this model as `start`.
    """
    from pathlib import Path

    from manyformer.api import load
    from manyformer.cli.console import print_result
    from manyformer.cli.model_arguments import copy_tokenizers, model_folder
    from manyformer.errors import UserError
    from manyformer.knn_memory import GATE
    from manyformer.knn_memory import memorize as give
    from manyformer.recipes import get_recipe

    folder = model_folder(run)
    if Path(out).exists():
        raise UserError(f"{out} exists already; choose another --out")
    given = {"memory": memory, "layer": layer, "neighbours": neighbours, "block": block}
    model = give(load(folder), gate=GATE if gate is None else gate, **given)  # type: ignore[arg-type]
    model.save(out)
    copy_tokenizers(folder, Path(out))
    recipe, words = model.spec
    usual = get_recipe(recipe).signature.parameters
    changed = {name: value for name, value in words.items() if value != usual[name].default and name != "vocab"}
    told = " ".join(f"model.{name}={value}" for name, value in changed.items())
    print_result(f"{recipe}: {told}")
    print_result(f"wrote {out}")
