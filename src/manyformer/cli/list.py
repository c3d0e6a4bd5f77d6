"""`manyformer list`: list the recipes."""

import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from manyformer.cli.app import FIND, command
from manyformer.cli.console import Block, Output, PageTable
from manyformer.cli.shell_completion import complete_recipes
from manyformer.errors import UserError, suggest_names
from manyformer.plugins import is_external

if TYPE_CHECKING:
    from manyformer.recipes import Recipe

PIPED_WIDTH = 120
"""The width of the list if the output is not a terminal."""
PROMISES_WIDTH = 100
COST_WIDTH = 140
"""The widths from which on there is room for these columns."""


@command(
    FIND,
    "manyformer list",
    'manyformer list "*classifier*"',
    "manyformer list --task language-model --json",
    name="list",
)
def list_recipes(
    pattern: Annotated[
        str,
        Argument(help="Part of a recipe's name or title, or a pattern with * and ?.", autocompletion=complete_recipes),
    ] = "*",
    *,
    task: Annotated[
        str | None,
        Option(
            help="Only this task: language-model, image-generation, translation, masked-lm, classification, tagging "
            "or image-classification."
        ),
    ] = None,
) -> Output:
    """List the recipes: name, title, year of the paper and, where they fit, promised contracts and cost.

    'manyformer check' tests the contracts: [bold]causal[/bold] (no output depends on later tokens),
    [bold]incremental_decoding[/bold] (decoding from a cached state gives the same as one pass),
    [bold]cross_attention[/bold] (attends to a second sequence), [bold]padding_invariant[/bold] (padding and packing do
    not change the outputs).
    """
    selected = _select_recipes(pattern, task)
    return Output([as_record(recipe) for recipe in selected], _page(selected))


def _page(selected: "list[Recipe]") -> Iterator[Block]:
    """A table of the columns that have room."""
    columns = {
        "recipe": [recipe.card.name for recipe in selected],
        "title": [recipe.card.title for recipe in selected],
        "year": [recipe.card.year or "" for recipe in selected],
    }
    if sys.stdout.isatty():
        width = shutil.get_terminal_size().columns
    else:
        width = PIPED_WIDTH
    if width >= PROMISES_WIDTH:
        columns["promises"] = [" ".join(recipe.card.promises) for recipe in selected]
    if width >= COST_WIDTH:
        columns["cost"] = [recipe.card.cost for recipe in selected]
    if any(is_external(recipe.module) for recipe in selected):
        columns["module"] = [recipe.module if is_external(recipe.module) else "" for recipe in selected]
    yield PageTable(tuple(columns), zip(*columns.values()), width=PIPED_WIDTH)
    yield "\n`manyformer show NAME` describes one, `manyformer train NAME` trains it."


def as_record(recipe: "Recipe") -> dict[str, Any]:
    """The card of a recipe, and the module that defines it, as a JSON record."""
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
    from manyformer.recipes import all_recipes
    from manyformer.tasks import task_named

    if task is not None:
        task_named(task)
    of_task = [recipe for recipe in all_recipes().values() if task in (None, recipe.card.task.name)]
    matching = [recipe for recipe in of_task if _matches(pattern, recipe)]
    if not matching:
        qualifier = "" if task is None else f" for the task {task}"
        names = (recipe.card.name for recipe in of_task)
        raise UserError(f"no recipe{qualifier} matches '{pattern}'; {suggest_names(pattern, names)}")
    return matching


def _matches(pattern: str, recipe: "Recipe") -> bool:
    if any(sign in pattern for sign in "*?["):
        return fnmatch(recipe.card.name, pattern)
    return pattern.lower() in recipe.card.name or pattern.lower() in recipe.card.title.lower()
