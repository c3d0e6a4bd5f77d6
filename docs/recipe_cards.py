"""The description of recipes for pages of the site."""

from collections.abc import Iterable, Iterator
from fnmatch import fnmatch

from manyformer.recipes import RECIPES, Recipe


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
    """The lines of a card."""
    card = recipe.card
    promises = ", ".join(card.promises) or "none"
    yield from (f"**[{card.name}]({root}recipes.md#{card.name})**: {card.title}. {card.summary} *{card.paper}*", "")
    yield from (f"Cost {card.cost}. Contracts: {promises}.", "")
    yield from ("```", f"manyformer show {card.name}", f"manyformer check {card.name}", "```", "")
