"""The description of recipes for pages of the site."""

from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from functools import cache

from manyformer.mixers.global_summaries import SummaryPrefixedLayer
from manyformer.model_summary import build_on_meta, count_parameters
from manyformer.models import Model
from manyformer.recipes import RECIPES, Recipe
from manyformer.view import attention_masks, draw

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


def names_without(patterns: Iterable[str]) -> list[str]:
    """The recipes that match none of the patterns."""
    patterns = list(patterns)
    return sorted(name for name in RECIPES if not any(fnmatch(name, pattern) for pattern in patterns))


def card(recipe: Recipe, root: str) -> Iterator[str]:
    """The lines of a card: the paper, cost and contracts, the number of parameters, and the first attention mask.

    The commands print the same, and more."""
    card = recipe.card
    promises = ", ".join(card.promises) or "none"
    parameters, picture = _shown(card.name)
    yield from (f"**[{card.name}]({root}recipes.md#{card.name})**: {card.title}. {card.summary} *{card.paper}*", "")
    yield from (f"Cost {card.cost}. Parameters: {parameters:,}. Contracts: {promises}.", "")
    pattern = [f"manyformer show {card.name} --pattern --length {PICTURE_LENGTH}"] * bool(picture)
    yield from ("```", f"manyformer show {card.name}", *pattern, f"manyformer bench {card.name}", "```", "")
    if picture:
        yield from ("```{code-block} none", ":class: mask", "", picture, "```", "")


@cache
def _shown(name: str) -> tuple[int, str]:
    """The parameters of a recipe with its defaults, and its first mask as text, "" if it has none."""
    model = build_on_meta(name, {})
    return count_parameters(model), _mask_picture(model)


def _mask_picture(model: Model) -> str:
    masks = list(attention_masks(model))
    # summaries before the text need a layout of their own, which `show --pattern` has
    if not masks or isinstance(getattr(model, "body", None), SummaryPrefixedLayer):
        return ""
    return draw(masks[0], PICTURE_LENGTH, heads=model.spec.keywords.get("heads", 1))


def gallery_page() -> str:
    """All recipes on one page."""
    lines = ["# Gallery", "", "Every recipe with its default sizes, and the commands that print what is shown."]
    lines += [f"A mask is that of the first layer, for {PICTURE_LENGTH} tokens: queries downwards, keys to the right."]
    return "\n".join([*lines, "", "```{recipe-cards}", "*", "```", ""])
