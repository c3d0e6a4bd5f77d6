"""A recipe built small: everything that is new in it still happens, within milliseconds."""

from collections.abc import Mapping
from typing import Any

import torch

from manyformer.models import Model
from manyformer.recipes import build, get_recipe

SMALL: dict[str, Any] = {
    "vocab": 29,
    "classes": 3,
    "dim": 16,
    "depth": 2,
    "heads": 2,
    "ff_dim": 24,
    "max_length": 128,
    "dropout": 0.0,
}
"""The common keywords; what only one recipe has, its card gives in `tiny_keywords`."""


SHAKE = 0.1


def small_keywords(name: str) -> dict[str, Any]:
    """Small sizes for the recipe `name`, and its card's own. Raises UserError."""
    recipe = get_recipe(name)
    sizes = {keyword: value for keyword, value in SMALL.items() if keyword in recipe.signature.parameters}
    return sizes | recipe.card.tiny_keywords


def build_small(name: str, keywords: Mapping[str, Any], seed: int) -> Model:
    """The recipe `name` with small sizes, its card's own small ones, and `keywords` on top. Raises UserError.

    All parameters are moved away from where they start: zero biases, unit gains and closed gates would hide mistakes.
    """
    keywords = small_keywords(name) | dict(keywords)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = build(name, **keywords)
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight), alpha=SHAKE)
    return model
