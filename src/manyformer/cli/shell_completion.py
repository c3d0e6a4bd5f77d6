"""What shells complete: recipes, shipped runs and comparisons, run files and folders of runs, without loading torch."""

import re
from collections.abc import Iterable
from pathlib import Path

import typer

from manyformer.plugins import RECIPE_GROUP, entry_points

RECIPES_FOLDER = Path(__file__).parents[1] / "recipes"
DECLARED_RECIPE = re.compile(r"^@recipe\(.*?^def (\w+)\(", re.MULTILINE | re.DOTALL)


def complete_recipes() -> list[str]:
    """The names of the recipes of this package and of installed ones, from their declarations: importing them takes
    seconds."""
    names = set(entry_points(RECIPE_GROUP))
    for file in RECIPES_FOLDER.glob("*.py"):
        names |= {name.replace("_", "-") for name in DECLARED_RECIPE.findall(file.read_text(encoding="utf-8"))}
    return sorted(names)


def complete_runs() -> list[str]:
    """The folders in `runs/`; shells complete other paths by themselves."""
    return sorted(path.as_posix() for path in Path("runs").glob("*/"))


def complete_models() -> list[str]:
    """Recipes and the folders of runs."""
    return [*complete_recipes(), *complete_runs()]


def complete_shipped_runs() -> list[str]:
    """The run files of the package."""
    from manyformer.config.shipped import shipped_runs

    return list(shipped_runs())


def complete_trainings(context: typer.Context) -> list[str]:
    """What `train` takes as its first argument; settings follow it."""
    return _before_settings(context, [*complete_shipped_runs(), *complete_models(), *_run_files()])


def complete_comparisons(context: typer.Context) -> list[str]:
    """What `compare` takes as its first argument; settings follow it."""
    from manyformer.config.shipped import shipped_comparisons

    return _before_settings(context, [*shipped_comparisons(), *_run_files()])


def _before_settings(context: typer.Context, names: Iterable[str]) -> list[str]:
    if context.params.get("arguments"):
        return []
    return list(names)


def _run_files() -> list[str]:
    return sorted(path.name for path in Path().glob("*.yaml"))
