"""Recipes with tiny sizes, which use all mechanisms of the recipe and run within milliseconds."""

from collections.abc import Mapping
from typing import Any

import torch

from manyformer.models import Model
from manyformer.models.tasks.masked_language_modelling import CLASSES, HEAD
from manyformer.recipes import build, get_recipe

TINY_KEYWORDS: dict[str, Any] = {
    "vocab": 29,
    "classes": 3,
    "dim": 16,
    "depth": 2,
    "heads": 2,
    "ff_dim": 24,
    "max_length": 128,
    "dropout": 0.0,
}
"""Common keywords; those that only one recipe has are in the `tiny_keywords` of its card."""


PERTURBATION = 0.1


def tiny_keywords(name: str) -> dict[str, Any]:
    """Tiny sizes for the recipe `name`, including those of its card. Raises UserError."""
    recipe = get_recipe(name)
    sizes = {keyword: value for keyword, value in TINY_KEYWORDS.items() if keyword in recipe.signature.parameters}
    if HEAD in recipe.signature.parameters:
        del sizes[CLASSES]  # the head that it has by default has no labels
    return sizes | recipe.card.tiny_keywords


def build_tiny(name: str, keywords: Mapping[str, Any], seed: int) -> Model:
    """Build the recipe `name` with `tiny_keywords`, overridden by `keywords`. Raises UserError.

    All parameters are perturbed: zero biases, unit gains and closed gates would hide defects.
    """
    keywords = tiny_keywords(name) | dict(keywords)
    # the generator of the process goes on as if nothing had been drawn
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = build(name, **keywords)
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight), alpha=PERTURBATION)
    return model
