"""Validate merged settings and report the errors of all sections together, as readable messages."""

import inspect
import re
from collections.abc import Iterable
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from manyformer.base.errors import format_value
from manyformer.base.keyword_checks import as_json, check_value, choice_error_text
from manyformer.config.data_sections import DATA_SECTIONS
from manyformer.config.run import UNION_TAGS, RunConfig
from manyformer.config.section import ConfigSection
from manyformer.config.setting_layers import SettingError, SettingLayer, SettingPath
from manyformer.config.setting_names import section_members, suggest_setting, tag_of, valid_settings, variant_of_setting

_TYPES = {
    "int_type": "a whole number",
    "int_parsing_size": "a smaller whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "finite_number": "a finite number",
    "tuple_type": "a list",
    "list_type": "a list",
}
_BOUNDS = {
    "greater_than": ("gt", "greater than"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "less than"),
    "less_than_equal": ("le", "at most"),
}
_NOT_A_MAPPING = ("model_type", "model_attributes_type", "dict_type")


def validate(
    layer: SettingLayer, signature: inspect.Signature | None, reported_paths: Iterable[str] = ()
) -> tuple[RunConfig | None, list[SettingError]]:
    """Validate the settings of a layer: the run, or None and every error.

    pydantic checks conflicts between settings only if each is valid by itself. Invalid settings are therefore reported,
    removed, and the rest is validated again. Conflicts with removed settings, and errors at the paths in
    `reported_paths`, are not reported.
    """
    data = {name: dict(part) if isinstance(part, dict) else part for name, part in layer.data.items()}
    valid_names = valid_settings(data, signature)
    errors = _check_model(data, layer, signature, valid_names)
    removed = set(reported_paths)
    while True:
        previous = set(removed)
        try:
            run = RunConfig.model_validate(data)
            return (None if errors else run), errors
        except ValidationError as error:
            for details in error.errors():
                path = _setting_path(details)
                if not _is_consequence(details, path, removed):
                    errors.append(_setting_error(details, path, layer, valid_names))
                removed.add(_remove_setting(data, path, missing=details["type"] == "missing"))
        # nothing more can be removed, so that the same errors would come again
        if removed == previous:
            return None, errors


def _check_model(
    data: dict[str, Any], layer: SettingLayer, signature: inspect.Signature | None, valid_names: list[str]
) -> list[SettingError]:
    model = data.get("model")
    if signature is None or not isinstance(model, dict):
        return []
    errors = []
    for name, value in list(model.items()):
        model[name], problem = check_keyword(name, value, signature, valid_names)
        if problem:
            errors.append(SettingError(layer.location_of(("model", name)), f"model.{name}", problem))
            del model[name]
    return errors


def check_keyword(name: str, value: Any, signature: inspect.Signature, valid_names: list[str]) -> tuple[Any, str]:
    """A model keyword as YAML has it and an empty text, or its value and the error message."""
    if name not in signature.parameters:
        return value, f"no such setting; {suggest_setting(f'model.{name}', valid_names)}"
    checked, problem = check_value(value, signature.parameters[name].annotation)
    return as_json(checked), problem


def _setting_path(details: ErrorDetails) -> SettingPath:
    """The path of a setting as in a file: pydantic's path without the member of a union."""
    # for pydantic, `data` is no union
    path = tuple(details["loc"])
    if len(path) > 1 and path[0] in ("optim", "schedule") and path[1] in _member_tags(str(path[0])):
        path = path[:1] + path[2:]
    if details["type"] == "union_tag_invalid":
        path = (*path, details["ctx"]["discriminator"].strip("'"))
    return path


def _tags(section: str) -> set[str]:
    """The settings that select the member of a section, and the variant of a kind of data."""
    tags = set[str]()
    if section in UNION_TAGS:
        tags.add(UNION_TAGS[section][0])
    if section == "data":
        tags.update(kind.variant_setting for kind in DATA_SECTIONS.values() if kind.variant_setting is not None)
    return tags


def _member_tags(section: str) -> list[str]:
    return [tag_of(member, UNION_TAGS[section][0]) for member in section_members(section)]


def _is_consequence(details: ErrorDetails, path: SettingPath, removed: set[str]) -> bool:
    if details["type"] != "conflict":
        return _dotted(path[:2]) in removed or str(path[0]) in removed
    involved = [_dotted(path), *details["ctx"]["other_settings"]]
    return any(
        name == removed_name or name.startswith(f"{removed_name}.") or removed_name.startswith(f"{name}.")
        for name in involved
        for removed_name in removed
    )


def _remove_setting(data: dict[str, Any], path: SettingPath, *, missing: bool) -> str:
    section = str(path[0])
    in_section = len(path) > 1 and isinstance(data.get(section), dict)
    container = data
    name = section
    if in_section:
        container = data[section]
        name = str(path[1])
    if missing:
        # any value, so that what depends on others can still be checked
        container[name] = "?"
    elif in_section and name in _tags(section):
        # Which member was meant is unknown, so its settings cannot be judged.
        del data[section]
        return section
    else:
        container.pop(name, None)
    return _dotted(path[:2])


def _setting_error(
    details: ErrorDetails, path: SettingPath, layer: SettingLayer, valid_names: list[str]
) -> SettingError:
    location = layer.location_of(path)
    # the place of a missing setting is that of its section, or of the tag that selects the section
    if details["type"] == "missing" and len(path) > 1 and path[0] in UNION_TAGS:
        location = layer.locations.get(path[:1]) or layer.location_of((path[0], UNION_TAGS[str(path[0])][0]))
    names = tuple(name for name in path if isinstance(name, str))
    message = error_text(details, path, valid_names)
    if details["type"] == "extra_forbidden" and path[0] == "data":
        message = variant_of_setting(layer.data, str(path[-1])) or message
    return SettingError(location, _dotted(names), message)


def error_text(details: ErrorDetails, path: SettingPath, valid_names: list[str]) -> str:
    """Turn pydantic's error into a readable message; `valid_names` are the names of all settings."""
    kind = details["type"]
    value = details["input"]
    ctx = details.get("ctx", {})
    if kind == "extra_forbidden":
        return f"no such setting; {suggest_setting(_dotted(path), valid_names)}"
    if kind == "missing":
        return f"is missing; {_required_setting_help(path)}"
    if kind == "conflict":
        return str(ctx["message"])
    if kind == "forms":
        return f"must be {ctx['forms']}, got {format_value(value)}"
    if kind == "literal_error":
        return choice_error_text(value, _quoted_names(ctx["expected"]))
    if kind == "union_tag_invalid":
        return choice_error_text(value[path[-1]], _quoted_names(ctx["expected_tags"]))
    if kind in _NOT_A_MAPPING:
        return _not_a_mapping(value, str(path[0]))
    if kind in _TYPES:
        return f"must be {_TYPES[kind]}, got {format_value(value)}"
    if kind in _BOUNDS:
        key, relation = _BOUNDS[kind]
        if isinstance(ctx[key], int):
            bound = ctx[key]
        else:
            bound = f"{ctx[key]:g}"
        return f"must be {relation} {bound}, got {format_value(value)}"
    if kind == "string_type":
        quote = ""
        if isinstance(value, int | float) and not isinstance(value, bool):
            quote = f"; for text write '{value}'"
        return f"must be text, got {format_value(value)}{quote}"
    if kind == "string_too_short":
        return "must not be empty"
    return f"{details['msg'][:1].lower()}{details['msg'][1:]}, got {format_value(value)}"


def _not_a_mapping(value: Any, section: str) -> str:
    tag = ""
    if section in UNION_TAGS:
        tag = UNION_TAGS[section][0]
    message = f"must be a mapping of settings, got {format_value(value)}"
    if section == "data" and isinstance(value, str) and value not in _member_tags(section):
        return f"{message}; did you mean data.path?"
    if tag and isinstance(value, str):
        return f"{message}; did you mean {section}.{tag}?"
    return message


def _required_setting_help(path: SettingPath) -> str:
    members: tuple[type[ConfigSection], ...] = (RunConfig,)
    if len(path) > 1:
        members = section_members(str(path[0]))
    for member in members:
        field = member.model_fields.get(str(path[-1]))
        if field is not None and field.is_required():
            doc = " ".join(str(field.description).split())
            return f"it is {doc[0].lower()}{doc[1:].rstrip('.')}"
    return "it has no default"


def _quoted_names(expected: str) -> list[Any]:
    return re.findall(r"'([^']*)'", expected)


def _dotted(path: SettingPath) -> str:
    return ".".join(str(name) for name in path)
