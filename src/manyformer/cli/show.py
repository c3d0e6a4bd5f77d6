"""`manyformer show NAME`: what a recipe is, what it consists of and what it costs."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from manyformer.cli.app import FIND, app, examples

if TYPE_CHECKING:
    from manyformer.models import Model
    from manyformer.recipes import Card, Recipe
    from manyformer.summary import Cost


@app.command(
    "show",
    rich_help_panel=FIND,
    epilog=examples(
        "manyformer show transformer",
        "manyformer show transformer-lm dim=256 depth=4 --length 4096",
        "manyformer show runs/lm-stdlib",
    ),
    context_settings={"ignore_unknown_options": True},
)
def show(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="A recipe, or the folder of a run or a saved model.")],
    keywords: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Keywords of the recipe, such as depth=4.")
    ] = None,
    *,
    length: Annotated[
        int | None, typer.Option(min=2, help="Tokens at which the cost is told; 512 unless given.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Explain a recipe: what is new, the paper, promises and why not, keywords, modules with parameters, cost.

    Nothing is computed, so models of any size are shown at once.
    """
    from manyformer.cli.console import say_json
    from manyformer.cli.pages import print_page
    from manyformer.cli.targets import model_of
    from manyformer.cli.words import with_options
    from manyformer.summary import sketch

    words = keywords or []
    recipe, given = with_options(context, words, lambda: model_of(name, words))
    model = sketch(recipe.card.name, given)
    if as_json:
        say_json(_record(recipe, model, _cost(model, length)))
    else:
        print_page(recipe, model, _cost(model, length))


def _cost(model: "Model", length: int | None) -> "Cost":
    from manyformer.summary import cost

    usual = 512 if model.longest is None else min(512, model.longest)
    return cost(model, usual if length is None else length)


def _record(recipe: "Recipe", model: "Model", cost: "Cost") -> dict[str, Any]:
    from dataclasses import asdict

    from manyformer.cli.list import as_record
    from manyformer.recipes.card import keywords
    from manyformer.summary import count_parameters, parts

    card: Card = recipe.card
    return {
        **as_record(card),
        "doc": recipe.build.__doc__,
        "keywords": [{**keyword._asdict(), "value": model.spec.keywords[keyword.name]} for keyword in keywords(recipe)],
        "parameters": count_parameters(model),
        "modules": [asdict(part) for part in parts(model)],
        "at_length": cost._asdict(),
    }
