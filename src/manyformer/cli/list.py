"""`manyformer list`: which recipes there are."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from manyformer.cli.app import FIND, app, examples

if TYPE_CHECKING:
    from manyformer.recipes import RecipeCard


@app.command(
    "list",
    rich_help_panel=FIND,
    epilog=examples(
        "manyformer list", 'manyformer list "*classifier*"', "manyformer list --task language-model --json"
    ),
)
def list_recipes(
    pattern: Annotated[
        str, typer.Argument(help="Only names that match: part of a name or a title, or a pattern with * and ?.")
    ] = "*",
    *,
    task: Annotated[
        str | None,
        typer.Option(
            help="Only this task: language-model, translation, masked, classification, tagging or image-classification."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print whole cards as JSON.")] = False,
) -> None:
    """List the recipes: name, title, year of the paper, promises and cost.

    A promise is something that 'manyformer check' tests: [bold]causal[/bold] (no look ahead), [bold]streams[/bold]
    (step by step gives the same as all at once), [bold]cross[/bold] (attends to a second sequence),
    [bold]padding[/bold] (padding and packing change nothing).
    """
    from manyformer.cli.console import print_json, print_result, print_table
    from manyformer.recipes.card_text import promises, year

    cards = _chosen(pattern, task)
    if as_json:
        print_json([as_record(card) for card in cards])
        return
    rows = [(card.name, card.title, year(card) or "", " ".join(promises(card)), card.cost) for card in cards]
    print_table(("recipe", "title", "year", "promises", "cost"), rows)
    print_result()
    print_result("`manyformer show NAME` explains one, `manyformer train NAME` trains it.")


def as_record(card: "RecipeCard") -> dict[str, Any]:
    """A card for scripts."""
    from dataclasses import asdict

    from manyformer.recipes.card_text import promises, year

    return {**asdict(card), "year": year(card), "promises": promises(card)}


def _chosen(pattern: str, task: str | None) -> "list[RecipeCard]":
    from typing import get_args

    from manyformer.api import recipes
    from manyformer.errors import UserError, nearest
    from manyformer.recipes.registry import Task

    if task is not None and task not in get_args(Task):
        raise UserError(f"there is no task '{task}'; {nearest(task, get_args(Task))}")
    cards = [recipe.card for recipe in recipes().values() if task in (None, recipe.card.task)]
    found = [card for card in cards if _matches(pattern, card)]
    if not found:
        among = "" if task is None else f" for the task {task}"
        raise UserError(f"no recipe{among} matches '{pattern}'; {nearest(pattern, (card.name for card in cards))}")
    return found


def _matches(pattern: str, card: "RecipeCard") -> bool:
    from fnmatch import fnmatch

    if any(sign in pattern for sign in "*?["):
        return fnmatch(card.name, pattern)
    return pattern.lower() in card.name or pattern.lower() in card.title.lower()
