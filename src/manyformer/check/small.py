"""A recipe built small: everything that is new in it still happens, within milliseconds."""

from collections.abc import Mapping
from typing import Any

from manyformer.models import Model
from manyformer.recipes import build, get

SMALL: dict[str, Any] = {
    "vocab": 29,
    "classes": 3,
    "dim": 16,
    "depth": 2,
    "heads": 2,
    "hidden": 24,
    "longest": 128,
    "dropout": 0.0,
}
"""The common keywords; what only one recipe has, its card gives in `small`."""


def build_small(name: str, keywords: Mapping[str, Any]) -> Model:
    """The recipe `name` with small sizes, its card's own small ones, and `keywords` on top. Raises UserError."""
    recipe = get(name)
    sizes = {keyword: value for keyword, value in SMALL.items() if keyword in recipe.signature.parameters}
    return build(name, **(sizes | recipe.card.small | dict(keywords)))
