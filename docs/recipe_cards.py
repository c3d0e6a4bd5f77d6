"""The description of recipes for pages of the site."""

from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from functools import cache

from cost_curves import drawing

from manyformer.analysis.figures import attention_masks, draw, draw_mixing, mixing_strengths
from manyformer.analysis.own_models import build_tiny
from manyformer.cli.show_pages import random_inputs
from manyformer.nn.attention.global_summaries import SummaryPrefixedLayer
from manyformer.recipes import RECIPES, Recipe
from manyformer.recipes.parts.model_summary import count_parameters
from manyformer.recipes.parts.registry import build_on_meta, task_of

PICTURE_LENGTH = 256
"""The tokens of a picture of a mask, in 64 cells on each side."""


def cards(patterns: Iterable[str], root: str) -> Iterator[str]:
    """The cards of the recipes that match the patterns, in their order; `root` leads from the page to docs/."""
    for pattern in patterns:
        names = sorted(name for name in RECIPES if fnmatch(name, pattern))
        if not names:
            raise ValueError(f"no recipe matches '{pattern}'")
        for name in names:
            yield from card(RECIPES[name], root)


def card(recipe: Recipe, root: str) -> Iterator[str]:
    """The lines of a card: the paper, cost and contracts, the number of parameters, the cost by length, and the first
    attention mask or, where no mask decides, how strongly outputs depend on tokens.

    The commands print the same, and more."""
    card = recipe.card
    promises = ", ".join(card.promises) or "none"
    parameters, option, picture = _shown(card.name)
    yield from (f"**[{card.name}]({root}recipes.md#{card.name})**: {card.title}. {card.summary} *{card.paper}*", "")
    yield from (f"Cost {card.cost}. Parameters: {parameters:,}. Contracts: {promises}.", "")
    commands = [f"manyformer show {card.name} {option}"] * bool(picture)
    yield from ("```", f"manyformer show {card.name}", *commands, f"manyformer bench {card.name}", "```", "")
    if curves := drawing(card.name):
        yield from ("```{raw} html", curves, "```", "")
    if picture:
        yield from ("```{code-block} none", ":class: mask", "", picture, "```", "")


@cache
def _shown(name: str) -> tuple[int, str, str]:
    """The parameters of a recipe with its defaults, the option of `show` for its picture, and the picture."""
    model = build_on_meta(name, {})
    parameters = count_parameters(model)
    masks = list(attention_masks(model))
    # summaries before the text need a layout of their own, which `show --pattern` has
    if masks and not isinstance(getattr(model, "body", None), SummaryPrefixedLayer):
        picture = draw(masks[0], PICTURE_LENGTH, heads=model.spec.keywords.get("heads", 1))
        return parameters, f"--pattern --length {PICTURE_LENGTH}", picture
    if not task_of(model).per_token:
        return parameters, "", ""
    tiny = build_tiny(name, {}, 0)
    return parameters, "--mixing", draw_mixing(mixing_strengths(tiny, random_inputs(tiny, None)))


def gallery_page() -> str:
    """All recipes on one page."""
    lines = ["# Gallery", "", "Every recipe with its default sizes, and the commands that print what is shown."]
    lines += [
        f"A mask is that of the first layer, for {PICTURE_LENGTH} tokens: queries downwards, keys to the right. Where",
        "no mask decides, the picture shows how strongly each output (downwards) of a tiny model with random weights",
        "depends on each token. Curves have the operations of one forward pass a token and the bytes of the state;",
        "both axes are logarithmic, and the whole height is a rise by that of the lengths.",
    ]
    return "\n".join([*lines, "", "```{recipe-cards}", "*", "```", ""])
