"""Validated runs from the arguments of a command line, with the registered recipes."""

import inspect
from collections.abc import Sequence

from manyformer.config import RunConfig, load_run
from manyformer.recipes import RECIPES, get_recipe


def signature_of(name: str) -> inspect.Signature:
    """A recipe's signature. Raises UserError with the nearest names."""
    return get_recipe(name).signature


def task_of(name: str) -> str:
    """A recipe's task. Raises UserError with the nearest names."""
    return get_recipe(name).card.task


def read_run(target: str, overrides: Sequence[str]) -> RunConfig:
    """The run that `target` and `overrides` describe. Raises UserErrors with every mistake."""
    return load_run(target, overrides, signature_of=signature_of, task_of=task_of, recipes=RECIPES)
