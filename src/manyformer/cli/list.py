"""`manyformer list`: list the recipes."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from manyformer.cli.app import FIND, app, examples

if TYPE_CHECKING:
    from manyformer.recipes import Recipe


@app.command(
    "list",
    rich_help_panel=FIND,
    epilog=examples(
        "manyformer list", 'manyformer list "*classifier*"', "manyformer list --task language-model --json"
    ),
)
def list_recipes(
    pattern: Annotated[
        str, typer.Argument(help="Only recipes that match: part of a name or title, or a pattern with * and ?.")
    ] = "*",
    *,
    task: Annotated[
        str | None,
        typer.Option(
            help="Only this task: language-model, image-generation, translation, masked-lm, classification, tagging "
            "or image-classification."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print whole cards as JSON.")] = False,
) -> None:
    """List the recipes: name, title, year of the paper, promised contracts and cost.

    'manyformer check' tests the contracts: [bold]causal[/bold] (no output depends on later tokens),
    [bold]incremental_decoding[/bold] (decoding from a cached state gives the same as one pass),
    [bold]cross_attention[/bold] (attends to a second sequence), [bold]padding_invariant[/bold] (padding and packing do
    not change the outputs).
    """
    from manyformer.cli.console import print_json, print_result, print_table
    from manyformer.plugins import is_external

    selected = _select_recipes(pattern, task)
    if as_json:
        print_json([as_record(recipe) for recipe in selected])
        return
    columns = ["recipe", "title", "year", "promises", "cost"]
    rows = [
        [card.name, card.title, str(card.year or ""), " ".join(card.promises), card.cost]
        for card in (recipe.card for recipe in selected)
    ]
    if any(is_external(recipe.module) for recipe in selected):
        columns.append("module")
        rows = [[*row, recipe.module if is_external(recipe.module) else ""] for row, recipe in zip(rows, selected)]
    print_table(columns, rows)
    print_result()
    print_result("`manyformer show NAME` describes one, `manyformer train NAME` trains it.")


def as_record(recipe: "Recipe") -> dict[str, Any]:
    """The card of a recipe, and the module that defines it, as a JSON record."""
    from dataclasses import asdict

    from manyformer.recipes.registry import PROMISES

    card = recipe.card
    return {
        **asdict(card),
        "task": card.task.name,
        "year": card.year,
        "promises": card.promises,
        **{name: name in card.promises for name in PROMISES},
        "module": recipe.module,
    }


def _select_recipes(pattern: str, task: str | None) -> "list[Recipe]":
    from manyformer.api import recipes
    from manyformer.errors import UserError, suggest_names
    from manyformer.tasks import task_named

    if task is not None:
        task_named(task)
    of_task = [recipe for recipe in recipes().values() if task in (None, recipe.card.task.name)]
    matching = [recipe for recipe in of_task if _matches(pattern, recipe)]
    if not matching:
        qualifier = "" if task is None else f" for the task {task}"
        names = (recipe.card.name for recipe in of_task)
        raise UserError(f"no recipe{qualifier} matches '{pattern}'; {suggest_names(pattern, names)}")
    return matching


def _matches(pattern: str, recipe: "Recipe") -> bool:
    from fnmatch import fnmatch

    if any(sign in pattern for sign in "*?["):
        return fnmatch(recipe.card.name, pattern)
    return pattern.lower() in recipe.card.name or pattern.lower() in recipe.card.title.lower()
