"""`manyformer memorize`: add a kNN memory to a trained language model."""

from typing import Annotated

from typer import Argument, Option

from manyformer.cli.app import USE, command
from manyformer.cli.console import print_result
from manyformer.cli.model_arguments import check_new_folder, model_folder
from manyformer.cli.shared_options import NewFolderOption


@command(
    USE,
    "manyformer memorize runs/lm-memory --memory 8192 --out runs/memory-8k",
    "manyformer train lm/memory recipe=memorizing-transformer init_from=runs/memory-8k",
)
def memorize(
    run: Annotated[str, Argument(help="The folder of a run or model: a transformer-xl or a memorizing-transformer.")],
    *,
    memory: Annotated[int, Option(min=1, help="Number of key-value pairs for each row and head.")],
    out: NewFolderOption,
    layer: Annotated[int | None, Option(min=1, help="The layer, from 1; three quarters up unless given.")] = None,
    neighbours: Annotated[int | None, Option(min=1, help="Number of pairs that each query retrieves.")] = None,
    block: Annotated[int | None, Option(min=1, help="Tokens that are added to the memory at a time.")] = None,
    gate: Annotated[float | None, Option(help="Initial weight of the memory, between 0 and 1.")] = None,
) -> None:
    """Add a kNN memory of cached keys and values to one layer of a trained model (Wu et al. 2022).

    The new model has the same weights and its outputs are initially close to the old model's. To make use of the
    memory, train it further: as recipe memorizing-transformer with the printed keywords, `packing: contiguous` and this
    model as `init_from`."""

    from manyformer.api import load
    from manyformer.knn_memory import DEFAULT_GATE
    from manyformer.knn_memory import memorize as give
    from manyformer.recipes import get_recipe

    folder = model_folder(run)
    check_new_folder(out)
    keywords = {"memory": memory, "layer": layer, "neighbours": neighbours, "block": block}
    model = give(load(folder), gate=DEFAULT_GATE if gate is None else gate, **keywords)  # type: ignore[arg-type]
    model.save(out, tokenizers_of=folder)
    recipe, model_keywords, _ = model.spec
    defaults = get_recipe(recipe).signature.parameters
    changed = {name: value for name, value in model_keywords.items() if value != defaults[name].default}
    settings = [f"model.{name}={value}" for name, value in changed.items() if name != "vocab"]
    print_result(f"{recipe}: {' '.join(settings)}", f"wrote {out}")
