"""Published models as functions, one file for each paper; a file is imported when one of its recipes is asked for."""

from typing import TYPE_CHECKING

from manyformer.base.lazy_names import offer_names as _offer_names

if TYPE_CHECKING:
    from manyformer.recipes.parts.cards import Recipe, RecipeCard
    from manyformer.recipes.parts.registry import (
        RECIPES,
        all_recipes,
        build,
        get_recipe,
        modules_to_import,
        read_saved_recipe,
        recipe,
        recipe_in_file,
        recipe_names,
    )

__all__ = [
    "RECIPES",
    "Recipe",
    "RecipeCard",
    "all_recipes",
    "build",
    "get_recipe",
    "modules_to_import",
    "read_saved_recipe",
    "recipe",
    "recipe_in_file",
    "recipe_names",
]

_offer_names(__name__, dict.fromkeys(__all__, f"{__name__}.parts.registry"))
