"""`manyformer list`: which recipes there are."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from manyformer.cli.app import FIND, app, examples

if TYPE_CHECKING:
    from manyformer.recipes import Card


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
    from manyformer.cli.console import say, say_json, say_table
    from manyformer.recipes.card import promises, year

    cards = _chosen(pattern, task)
    if as_json:
        say_json([as_record(card) for card in cards])
        return
    rows = [(card.name, card.title, year(card) or "", " ".join(promises(card)), card.cost) for card in cards]
    say_table(("recipe", "title", "year", "promises", "cost"), rows)
    say()
    say("`manyformer show NAME` explains one, `manyformer train NAME` trains it.")


def as_record(card: "Card") -> dict[str, Any]:
    """A card for scripts."""
    from dataclasses import asdict

    from manyformer.recipes.card import promises, year

    return {**asdict(card), "year": year(card), "promises": promises(card)}


def _chosen(pattern: str, task: str | None) -> "list[Card]":
    from typing import get_args

    from manyformer.errors import UserError, nearest
    from manyformer.face import recipes
    from manyformer.recipes.registry import Task

    if task is not None and task not in get_args(Task):
        raise UserError(f"there is no task '{task}'; {nearest(task, get_args(Task))}")
    cards = [recipe.card for recipe in recipes().values() if task in (None, recipe.card.task)]
    found = [card for card in cards if _matches(pattern, card)]
    if not found:
        among = "" if task is None else f" for the task {task}"
        raise UserError(f"no recipe{among} matches '{pattern}'; {nearest(pattern, (card.name for card in cards))}")
    return found


def _matches(pattern: str, card: "Card") -> bool:
    from fnmatch import fnmatch

    if any(sign in pattern for sign in "*?["):
        return fnmatch(card.name, pattern)
    return pattern.lower() in card.name or pattern.lower() in card.title.lower()
