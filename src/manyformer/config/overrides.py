"""Settings on the command line: `key=value`, `--key value` and `--key=value` are equivalent, and so are `-` and `_`."""

import inspect
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any, NamedTuple

from manyformer.base.errors import UserError, UserErrors, format_value
from manyformer.config.run_file import MAX_SETTINGS, parse_value
from manyformer.config.setting_layers import SettingError, SettingLayer, SettingPath, SourceLocation, overlay
from manyformer.config.setting_names import RUN_SETTINGS, SECTIONS, leaf, suggest_setting, valid_settings


class SettingOverride(NamedTuple):
    """One setting from the command line, its key with underscores."""

    key: str
    value: Any
    location: SourceLocation


def parse_overrides(overrides: Sequence[str] | Mapping[str, Any]) -> tuple[list[SettingOverride], list[SettingError]]:
    """Parse command-line arguments (or a mapping, from Python) into overrides and errors."""
    if isinstance(overrides, Mapping):
        # Python's paths are text in a run
        settings = {key: str(value) if isinstance(value, PurePath) else value for key, value in overrides.items()}
        return [_make_override(key, value, format_value(value)) for key, value in settings.items()], []
    parsed: list[SettingOverride] = []
    errors: list[SettingError] = []
    arguments = list(overrides)
    if len(arguments) > MAX_SETTINGS:
        raise UserErrors(
            [f"{len(arguments):,} settings are given on the command line, and at most {MAX_SETTINGS} can be"]
        )
    while arguments:
        argument = arguments.pop(0)
        key, equals, text = argument.removeprefix("--").partition("=")
        # `--key value`; a negative number is a value, another option is none
        if not equals and argument.startswith("--") and arguments and not arguments[0].startswith("--"):
            equals = "="
            text = arguments.pop(0)
        if not equals or not key.strip():
            message = "is no setting; write key=value or --key value"
            if argument.startswith("--") and key:
                message = f"needs a value, as in `{argument} true`"
            errors.append(
                SettingError(SourceLocation(argument=argument if argument.strip() else repr(argument)), "", message)
            )
            continue
        if not argument.isprintable() and any("\ud800" <= letter <= "\udfff" for letter in f"{key}{text}"):
            message = "holds bytes that are not UTF-8; rename the file"
            errors.append(
                SettingError(SourceLocation(argument=f"--{key.encode('utf-8', 'replace').decode()}"), "", message)
            )
            continue
        try:
            parsed.append(_make_override(key, parse_value(text), text))
        except UserError as error:
            errors.append(SettingError(_argument_location(key, text), "", str(error)))
    return parsed, errors


def place_overrides(
    overrides: Sequence[SettingOverride], base: SettingLayer, signature: inspect.Signature | None
) -> tuple[SettingLayer, list[SettingError]]:
    """Put all overrides into one layer, later ones over earlier ones; bare keywords go to the model section."""
    layer = SettingLayer()
    errors = list[SettingError]()
    dotted = [override for override in overrides if "." in override.key or override.key in RUN_SETTINGS]
    # Dotted keys select the members of unions, which decides what settings a bare keyword could mean.
    settings = SettingLayer()
    for override in dotted:
        _put_override(settings, override.key, override)
    data = overlay(base, settings).data
    valid_names = valid_settings(data, signature)
    for override in overrides:
        key = override.key
        problem = ""
        if override not in dotted:
            key, problem = _expand_key(override.key, valid_names, signature)
        section, _, setting = key.partition(".")
        if not problem and setting and (section not in {*SECTIONS, "model"} or "." in setting):
            problem = f"no such setting; {suggest_setting(key, valid_names)}"
        if problem:
            errors.append(SettingError(override.location, override.key, problem))
        else:
            _put_override(layer, key, override)
    return layer, errors


def _expand_key(key: str, valid_names: list[str], signature: inspect.Signature | None) -> tuple[str, str]:
    """The full name of the setting that a bare key means, and an error message or an empty text."""
    keyword = f"model.{key}"
    matches = [name for name in valid_names if leaf(name) == key and name != keyword]
    if signature is None:
        # Without a recipe the valid model keywords are unknown; only the name of another setting is an error.
        return keyword, f"no such setting; {suggest_setting(key, valid_names)}" if matches else ""
    if keyword not in valid_names:
        return "", f"no such setting; {suggest_setting(key, valid_names)}"
    if matches:
        return "", f"could mean {' or '.join([keyword, *matches])}; write one of them"
    return keyword, ""


def _put_override(layer: SettingLayer, key: str, override: SettingOverride) -> None:
    path = tuple(key.split(".")[:2])
    value = override.value
    locations: dict[SettingPath, SourceLocation] = {(): override.location}
    # a mapping is laid over the section like its settings one by one: the others stay
    if key in {*SECTIONS, "model"} and isinstance(value, dict | None):
        for name, item in (value or {}).items():
            layer.put((key, name), item, locations)
    elif len(path) == 1 or isinstance(layer.data.get(path[0], {}), dict):
        layer.put(path, value, locations)


def _make_override(key: str, value: Any, text: str) -> SettingOverride:
    location = _argument_location(key, text)
    return SettingOverride(location.key, value, location)


def _argument_location(key: str, text: str) -> SourceLocation:
    if not text or any(character.isspace() for character in text):
        quoted = f"'{text}'"
    else:
        quoted = text
    key = key.strip()
    return SourceLocation(argument=f"--{key} {quoted}", key=key.replace("-", "_"))
