"""`manyformer list`: all recipes; `manyformer show NAME`: the description, modules and cost of one."""

import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from manyformer.base.errors import UserError, suggest_names
from manyformer.base.plugins import is_external
from manyformer.cli.app import FIND, command
from manyformer.cli.console import Block, Note, Output, PageTable
from manyformer.cli.model_arguments import model_of
from manyformer.cli.options import KeywordsArgument, complete_models, complete_recipes

if TYPE_CHECKING:
    from manyformer.models import Model
    from manyformer.nn.core import PrefixedLayout
    from manyformer.nn.masks import Mask
    from manyformer.recipes import Recipe
    from manyformer.recipes.parts.model_summary import ForwardCost


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
    return Output([_card_record(recipe) for recipe in selected], _list_page(selected))


def _list_page(selected: "list[Recipe]") -> Iterator[Block]:
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
    # recipes of this package would only repeat its name
    if any(is_external(recipe.module) for recipe in selected):
        columns["module"] = [recipe.module if is_external(recipe.module) else "" for recipe in selected]
    yield PageTable(tuple(columns), zip(*columns.values()), width=PIPED_WIDTH)
    yield "\n`manyformer show NAME` describes one, `manyformer train NAME` trains it."


def _card_record(recipe: "Recipe") -> dict[str, Any]:
    """The card of a recipe, and the module that defines it, as a JSON record."""
    from manyformer.recipes.parts.registry import PROMISES

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
    from manyformer.models.tasks import task_named
    from manyformer.recipes import all_recipes

    if task is not None:
        task_named(task)
    of_task = [recipe for recipe in all_recipes().values() if task in (None, recipe.card.task.name)]
    matching = [recipe for recipe in of_task if _matches_recipe(pattern, recipe)]
    if not matching:
        qualifier = "" if task is None else f" for the task {task}"
        names = (recipe.card.name for recipe in of_task)
        raise UserError(f"no recipe{qualifier} matches '{pattern}'; {suggest_names(pattern, names)}")
    return matching


def _matches_recipe(pattern: str, recipe: "Recipe") -> bool:
    # a pattern is for names alone; a plain word is found in titles, too
    if any(sign in pattern for sign in "*?["):
        return fnmatch(recipe.card.name, pattern)
    return pattern.lower() in recipe.card.name or pattern.lower() in recipe.card.title.lower()


PATTERN_LENGTH = 64
"""The default length of a mask pattern in tokens."""


@command(
    FIND,
    "manyformer show transformer",
    "manyformer show transformer-lm dim=256 depth=4 --length 4096",
    "manyformer show runs/lm-stdlib",
    "manyformer show longformer --pattern --length 1024 --out pattern.png",
    "manyformer show performer --properties",
    "manyformer show reformer --mixing --out mixing.png",
    accepts_settings=True,
)
def show(
    name: Annotated[
        str, Argument(help="A recipe, or the folder of a run or a saved model.", autocompletion=complete_models)
    ],
    keywords: KeywordsArgument = None,
    *,
    length: Annotated[int | None, Option(min=2, help="Length in tokens for the cost; 512 unless given.")] = None,
    pattern: Annotated[bool, Option("--pattern", help="Draw the attention mask instead.")] = False,
    draw_all: Annotated[
        bool, Option("--all", help="With --pattern: draw the masks of all layers, not only the first.")
    ] = False,
    properties: Annotated[
        bool, Option("--properties", help="Measure properties of its attention instead: convex hull, symmetries, rank.")
    ] = False,
    mixing: Annotated[
        bool, Option("--mixing", help="Draw how strongly each output depends on each token instead, as measured.")
    ] = False,
    out: Annotated[
        Path | None, Option(help="With --pattern or --mixing: also write a picture, .png, .svg or .pdf.")
    ] = None,
) -> Output:
    """Describe a recipe: summary, paper, contracts, keywords, modules with parameters, cost.

    Weights are not allocated, so models of any size are shown at once. Where the cost depends on the tokens, as with
    experts and hashing, the model is built and run instead.
    """
    from manyformer.cli.show_pages import recipe_page
    from manyformer.recipes.parts.registry import build_on_meta

    recipe, model_keywords = model_of(name, keywords)
    _check_views({"--pattern": pattern, "--properties": properties, "--mixing": mixing}, draw_all=draw_all, out=out)
    if properties or mixing:
        from manyformer.cli.show_pages import measured_mixing, measured_properties

        if mixing:
            return measured_mixing(name, recipe, keywords, length, out)
        return measured_properties(name, recipe, keywords, length)
    model = build_on_meta(recipe.card.name, model_keywords)
    if pattern:
        return _pattern(model, length or PATTERN_LENGTH, out, draw_all=draw_all)
    cost = _cost(model, length)
    return Output(_recipe_record(recipe, model, cost), recipe_page(recipe, model, cost))


def _check_views(views: dict[str, bool], *, draw_all: bool, out: Path | None) -> None:
    """Raise UserError for options that contradict one another or that would be ignored."""
    chosen = [option for option, is_chosen in views.items() if is_chosen]
    if len(chosen) > 1:
        raise UserError(f"give either {' or '.join(chosen)}, not both")
    if draw_all and chosen != ["--pattern"]:
        raise UserError("--all is for --pattern")
    if out and chosen not in (["--pattern"], ["--mixing"]):
        raise UserError("--out is for --pattern and --mixing")


def _pattern(model: "Model", length: int, out: Path | None, *, draw_all: bool) -> Output:
    """The attention masks of a model. Raises UserError if it has none."""
    from manyformer.analysis.figures import attention_masks

    masks = attention_masks(model)
    if not masks:
        raise UserError("no module of this model has an attention mask, so there is no pattern to draw")
    value = [{"mask": repr(mask), "modules": names} for mask, names in masks.items()]
    # pictures are written whether the page is printed or not
    return Output(value, list(_pattern_page(model, masks, length, out, draw_all=draw_all)))


def _pattern_page(
    model: "Model", masks: "Mapping[Mask, Sequence[str]]", length: int, out: Path | None, *, draw_all: bool
) -> Iterator[Block]:
    """The first mask, or all, with a list of those that are not drawn; a file is written for each of them."""
    from manyformer.analysis.figures import draw

    heads = model.spec.keywords.get("heads", 1)
    layout, summary_note = _summaries(model, length)
    length += 0 if layout is None else layout.prefix
    for number, (mask, names) in enumerate(masks.items()):
        if out is None or len(masks) == 1:
            path = out
        else:
            path = out.with_stem(f"{out.stem}-{number + 1}")
        others_note = ""
        if len(names) > 1:
            others_note = f" and {len(names) - 1} more"
        axes_note = f"{summary_note}{length} tokens, queries downwards, keys to the right"
        picture = ""
        if path or draw_all or not number:
            picture = draw(mask, length, heads=heads, path=path, layout=layout)
        # a model may have dozens of masks, and a picture of each would hide the first
        if draw_all or not number:
            yield f"{mask!r}\n{names[0]}{others_note}, {axes_note}\n{picture}\n"
        else:
            yield Note(f"{names[0]}{others_note}: {mask!r}; --all draws it")
        if path is not None:
            yield Note(f"wrote {path}")


def _summaries(model: "Model", length: int) -> "tuple[PrefixedLayout | None, str]":
    """The layout with summary tokens before a text of this length (None without summaries), and a note about it."""
    summary_tokens = getattr(model, "summary_tokens", None)
    if summary_tokens is None:
        return None, ""
    layout = summary_tokens.layout(length)
    return layout, f"the first {layout.prefix} summaries, "


def _cost(model: "Model", length: int | None) -> "ForwardCost":
    from manyformer.recipes.parts.model_summary import forward_cost

    default_length = 512
    if model.max_length is not None:
        default_length = min(512, model.max_length)
    return forward_cost(model, default_length if length is None else length)


def _recipe_record(recipe: "Recipe", model: "Model", cost: "ForwardCost") -> dict[str, Any]:
    from manyformer.config import describe_keywords
    from manyformer.recipes.parts.model_summary import count_parameters, module_rows

    values = model.spec.keywords
    keywords = describe_keywords(recipe.signature)
    return {
        **_card_record(recipe),
        "doc": recipe.build.__doc__,
        "keywords": [{**keyword._asdict(), "value": values[keyword.name]} for keyword in keywords],
        "parameters": count_parameters(model),
        "modules": module_rows(model),
        "at_length": cost,
    }
