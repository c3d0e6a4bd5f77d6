"""The settings that a run takes from the model that `init_from` names, unless it sets them itself."""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from manyformer.config.run import RunConfig
from manyformer.config.setting_layers import SettingLayer
from manyformer.config.setting_names import selected_member

TOKENIZER_SETTINGS = ("tokenizer_of", "tokenizer", "vocab")

RECORDED_SETTINGS = {"seed", "precision", "trackers", "compile", "device"}
"""Settings that the file of a run in its folder has: it has all of them, and nothing is left to be filled in."""


class InitialModel(NamedTuple):
    """The model that `init_from` names: its path, its recipe with keywords, and whether it has one tokenizer."""

    path: str
    recipe: str
    keywords: dict[str, Any]
    has_tokenizer: bool


InitialModelFn = Callable[[str, str], InitialModel | None]
"""Describes the model that `init_from` names, or what the run in a folder has recorded of it; None if there is none."""


def find_saved_model(settings: SettingLayer, default_out: str, describe: InitialModelFn | None) -> InitialModel | None:
    """The model that the settings name as `init_from`; None without one, for wrong values and for a recorded run."""
    path = settings.data.get("init_from")
    out = settings.data.get("out") or default_out
    is_override = bool(settings.location_of(("init_from",)).argument)
    if describe is None or (settings.data.keys() >= RECORDED_SETTINGS and not is_override):
        return None
    if isinstance(path, str) and path and isinstance(out, str):
        return describe(path, out)
    return None


def with_saved_tokenizer(settings: SettingLayer, saved: InitialModel | None) -> SettingLayer:
    """The settings with the saved model's tokenizer, if the data takes one and no setting names another."""
    member = selected_member("data", settings.data)
    section = settings.data.get("data", {})
    if saved is None or not saved.has_tokenizer or member is None or not isinstance(section, dict):
        return settings
    if "tokenizer_of" in member.model_fields and all(section.get(name) is None for name in TOKENIZER_SETTINGS):
        settings.put(("data", "tokenizer_of"), saved.path, {})
    return settings


def with_saved_keywords(run: RunConfig, saved: InitialModel, signature: inspect.Signature) -> RunConfig:
    """The run with the saved model's keywords where it sets none, if it has the same recipe.

    Keywords that the data decides, and those with the recipe's defaults, are left out.
    """
    if run.recipe != saved.recipe:
        return run
    parameters = signature.parameters
    decided = run.data.expected_keywords(set(parameters)).keywords.keys()
    taken = {
        name: value
        for name, value in saved.keywords.items()
        if name in parameters
        and value != parameters[name].default
        # a recipe with a length of its own does not take that of the data
        and (name not in decided or (name == "max_length" and parameters[name].default is not None))
    }
    return run.model_copy(update={"model": {**taken, **run.model}})
