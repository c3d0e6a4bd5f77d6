"""Published models as functions, one file for each paper; importing this package registers the recipes of all files."""

import importlib
import pkgutil

from manyformer.recipes.parts.registry import (
    RECIPES,
    Recipe,
    RecipeCard,
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

importlib.import_module(f"{__name__}.parts.own_modules")
for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
