"""`manyformer show NAME`: what a recipe is, what it consists of and what it costs."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from manyformer.cli.app import FIND, app, examples

if TYPE_CHECKING:
    from manyformer.core import Fronted
    from manyformer.models import Model
    from manyformer.recipes import Card, Recipe
    from manyformer.summary import Cost

PATTERN = 64
"""Tokens of a pattern unless another length is given: one for each character of a line."""


@app.command(
    "show",
    rich_help_panel=FIND,
    epilog=examples(
        "manyformer show transformer",
        "manyformer show transformer-lm dim=256 depth=4 --length 4096",
        "manyformer show runs/lm-stdlib",
        "manyformer show longformer --pattern --length 1024 --out pattern.png",
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
    pattern: Annotated[bool, typer.Option("--pattern", help="Draw who may look at whom, instead.")] = False,
    out: Annotated[Path | None, typer.Option(help="With --pattern: a picture as well, .png, .svg or .pdf.")] = None,
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
    if pattern:
        _draw(model, length or PATTERN, out)
    elif as_json:
        say_json(_record(recipe, model, _cost(model, length)))
    else:
        print_page(recipe, model, _cost(model, length))


def _draw(model: "Model", length: int, out: Path | None) -> None:
    from manyformer.cli.console import note, say
    from manyformer.errors import UserError
    from manyformer.view import draw, patterns

    found = patterns(model)
    if not found:
        raise UserError("no part of this model keeps to a mask, so there is nothing to draw")
    heads = model.spec.keywords.get("heads", 1)
    layout, told = _summaries(model, length)
    length += 0 if layout is None else layout.front
    for number, (mask, names) in enumerate(found.items()):
        path = out if out is None or len(found) == 1 else out.with_stem(f"{out.stem}-{number + 1}")
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        say(f"{mask!r}\n{names[0]}{more}, {told}{length} tokens, queries downwards, keys to the right")
        say(draw(mask, length, heads=heads, path=path, layout=layout) + "\n")
        if path is not None:
            note(f"wrote {path}")


def _summaries(model: "Model", length: int) -> "tuple[Fronted | None, str]":
    """What stands before a text of this length, where anything does."""
    from manyformer.mixers.summaries import Summarised

    body = getattr(model, "body", None)
    if not isinstance(body, Summarised):
        return None, ""
    layout = body.kinds.layout(length)
    return layout, f"the first {layout.front} summaries, "


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
